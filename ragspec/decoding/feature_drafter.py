"""Drafting by a head that attends to the whole text, over hidden states from between the target's layers (EAGLE-3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from ragspec.decoding.attention import Segment
from ragspec.decoding.draft import Standing, Stretch
from ragspec.decoding.head_drafter import LONGEST_DRAFT, ChainHead, Ending, HeadDrafter, Place
from ragspec.decoding.target import Cache


class FeatureHead(ChainHead, Protocol):
    """A head that attends: `Ending.state` is what it made of a token's features, and `Ending.place` says where its keys are."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose inputs are its features; see `Target.forward`."""
        ...

    def slot_bytes(self, capacity: int) -> int:
        """Memory of one slot of `capacity` tokens."""
        ...

    def make_cache(self, slots: int, capacity: int) -> Cache:
        """A cache for its keys and values; see `Target.make_cache`."""
        ...

    def extend(self, cache: Any, segments: Sequence[Segment], following: Sequence[int], features: Tensor) -> Tensor:
        """Put tokens into a cache that it made.

        Args:
            cache: its own.
            segments: whose the tokens are, in packed order.
            following: the token behind each, [n].
            features: of each, [n, layers, hidden].

        Returns:
            The states to go on from behind each, [n, width].
        """
        ...


class AttentionDrafter(HeadDrafter):
    """A `HeadDrafter` whose head attends: its cache is filled as the target's is, and slot for slot the same.

    Args:
        head: attends.
        identity: recorded with every answer.
        longest: most tokens of a draft; `LONGEST_DRAFT` caps it.
        clock: seconds; for tests.
    """

    wants_hidden = False

    def __init__(
        self,
        head: FeatureHead,
        identity: str = "",
        longest: int = LONGEST_DRAFT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(head, identity, longest, clock)
        self.features = head.layers
        self._attending = head
        self._cache: Cache | None = None
        self._standings: Mapping[str, Standing] = {}

    def slot_bytes(self, capacity: int) -> int:
        """Memory of one slot: the longest draft fits behind a text that fills the target's."""
        return self._attending.slot_bytes(capacity + LONGEST_DRAFT)

    def make_cache(self, slots: int, capacity: int) -> Cache:
        """The cache that it works on from now on."""
        self._cache = self._attending.make_cache(slots, capacity + LONGEST_DRAFT)
        return self._cache

    def locate(self, standings: Mapping[str, Standing]) -> None:
        """Note who stands where."""
        self._standings = standings

    def follow(self, stretches: Sequence[Stretch], features: Tensor) -> None:
        """Put what the target computed into the cache, and keep each sequence's last state."""
        told = [stretch for stretch in stretches if stretch.following]
        if not told:
            return
        segments = [Segment(stretch.slot, stretch.start, len(stretch.following)) for stretch in told]
        following = [token for stretch in told for token in stretch.following]
        states = self._attending.extend(self._cache, segments, following, features)
        end = 0
        for stretch, segment in zip(told, segments, strict=True):
            end += segment.length
            known = self._known.get(stretch.request_id)
            if known is not None:
                known.state, known.token, known.position = states[end - 1], stretch.following[-1], segment.end - 1

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Nothing: `follow` tells it all."""

    def can_go_on(self, request_id: str) -> bool:
        """Whether the last state is of the last token that the target's cache holds: it is not where a step was interrupted."""
        cached = self._standings[request_id].cached
        return super().can_go_on(request_id) and self._known[request_id].position == cached - 1

    def ending(self, request_id: str) -> Ending:
        """Where a sequence stands, and where its keys are."""
        place = Place(self._cache, self._standings[request_id].slot, self._known[request_id].position)
        return replace(super().ending(request_id), place=place)


def make_head_drafter(head: ChainHead, identity: str = "", longest: int = LONGEST_DRAFT) -> HeadDrafter:
    """The drafter that a head needs."""
    if hasattr(head, "layers"):
        return AttentionDrafter(head, identity, longest)  # type: ignore[arg-type]  # what has layers is a FeatureHead
    return HeadDrafter(head, identity, longest)
