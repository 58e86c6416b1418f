"""An attention head as a drafter's chain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ragspec.decoding.attention import Segment
from ragspec.decoding.cache import LayerLayout, SlotCache
from ragspec.decoding.head_drafter import Drafts, Ending, Place, Reach
from ragspec.decoding.step_plan import StepPlan
from ragspec.decoding.target import Target
from ragspec.heads.attention import AttentionHead
from ragspec.heads.chain import DraftRows, chain_dtype, placed, walk_ahead
from ragspec.heads.shape import feature_layers


class AttentionChain:
    """An attention head that drafts for a target; see `ragspec.decoding.feature_drafter.FeatureHead`.

    Args:
        head: moved to the target's device, in bfloat16 on CUDA and float32 elsewhere.
        target: gives what the head lacks: its embeddings, and a copy of its output rows of the draft vocabulary.
    """

    def __init__(self, head: AttentionHead, target: Target) -> None:
        self._head = placed(head, target)
        self._dtype = chain_dtype(target)
        self._target = target
        self._rows = DraftRows(head, target, None if head.output is None else head.output.weight)
        self.layers = feature_layers(head.layer, target.layers)
        layer = head.layer
        self._layout = LayerLayout(layer.key_heads, layer.head_dim, layer.head_dim, self._dtype, target.device)

    def slot_bytes(self, capacity: int) -> int:
        """Memory of one slot of `capacity` tokens, and the place behind them."""
        return (capacity + 1) * self._layout.token_bytes

    def make_cache(self, slots: int, capacity: int) -> SlotCache:
        """A cache for its keys and values, its memory reserved."""
        cache = SlotCache(slots=slots, capacity=capacity)
        cache.reserve({self._head.layer_idx: self._layout})
        return cache

    def extend(
        self, cache: SlotCache, segments: Sequence[Segment], following: Sequence[int], features: Tensor
    ) -> Tensor:
        """See `ragspec.decoding.feature_drafter.FeatureHead`."""
        states: Tensor = self._head.fuse(features.flatten(1).to(self._dtype))
        slots = [segment.slot for segment in segments for _ in range(segment.length)]
        positions = [position for segment in segments for position in range(segment.start, segment.end)]
        where, when = torch.tensor([slots, positions], device=self._target.device)
        keys, values = self._head.keys_and_values(states, self._embedded(following), when)
        cache.write(self._head.layer_idx, where, when, keys, values)
        return states

    def extras(self, tokens: Iterable[int]) -> Any:
        """A prompt's tokens outside the draft vocabulary, with their output rows, where the head borrows the target's."""
        return self._rows.extras(tokens)

    def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
        """See `ragspec.decoding.head_drafter.ChainHead`."""
        state = torch.stack([ending.state for ending in endings])
        places = [_place(ending) for ending in endings]

        def features(last: list[int], ahead: int) -> Tensor:
            nonlocal state
            segments = [Segment(place.slot, place.position + ahead, 1) for place in places]
            plan = StepPlan(places[0].cache, segments, last, (), device=self._target.device, dtype=self._dtype)
            state = self._head.advance(state, self._embedded(last), plan)
            normed: Tensor = self._head.output_norm(state)
            return normed

        return walk_ahead(features, self._rows, endings, reach)

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        own = self._head.embedding
        rows = self._target.embedding_rows(tokens) if own is None else own.weight[list(tokens)]
        return rows.to(self._dtype)


def _place(ending: Ending) -> Place:
    if ending.place is None:
        msg = "the ending does not say where the sequence's keys are"
        raise ValueError(msg)
    return ending.place
