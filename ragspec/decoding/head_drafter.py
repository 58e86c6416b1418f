"""Drafting by a speculation head: a small network that walks ahead from the target's own hidden state."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import FREE_STAKES, Draft, Evidence, Stakes
from ragspec.decoding.request import Request

#: Most tokens of a head's draft: it was trained for about as many, and few drafts stand so long.
LONGEST_DRAFT = 6
#: How often, about, a token stands where the one before it stood: what the survivors of a step promise of the next.
_GOES_ON = 0.5
#: What is left of the running mean of a chain step's seconds after another chain.
_FADING = 0.9


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a head drafted for several sequences.

    Attributes:
        tokens: of each sequence.
        probabilities: the head's own for each of them, given those before.
        walked: steps of the chain that this took.
    """

    tokens: Sequence[tuple[int, ...]]
    probabilities: Sequence[tuple[float, ...]]
    walked: int


class ChainHead(Protocol):
    """A head ready to draft for one target.

    `ragspec.decoding.native.head` runs the recurrent one in 8 bits, `ragspec.heads.chain` any of them in torch.
    """

    @property
    def draft_tokens(self) -> frozenset[int]:
        """The draft vocabulary."""
        ...

    def draft(
        self,
        states: Sequence[Tensor],
        tokens: Sequence[int],
        extras: Sequence[tuple[int, ...]],
        steps: int,
        row_price: float,
        step_price: float,
    ) -> Drafts:
        """Draft for several sequences, each token the likeliest one.

        Args:
            states: the target's final hidden state that gave the last token of each, [hidden].
            tokens: that last token of each.
            extras: tokens that may be drafted beside the draft vocabulary, for each.
            steps: most tokens of a draft.
            row_price: a draft ends before the token that survives with less than this probability.
            step_price: all drafts end where the sum of what the survivors promise beyond `row_price` is less than this.
        """
        ...


@dataclass(slots=True)
class _Ending:
    """Where a sequence stands."""

    extras: tuple[int, ...]
    state: Tensor | None = None
    token: int = 0


class HeadDrafter:
    """Asks a head for the sequences that it is told to draft for, all in one chain of steps.

    Args:
        head: walks ahead.
        identity: recorded with every answer.
        longest: most tokens of a draft; `LONGEST_DRAFT` caps it.
        clock: seconds; for tests.
    """

    name = "head"
    wants_hidden = True
    costly = True

    def __init__(
        self,
        head: ChainHead,
        identity: str = "",
        longest: int = LONGEST_DRAFT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.identity = identity
        self._head = head
        self._longest = min(longest, LONGEST_DRAFT)
        self._clock = clock
        self._endings: dict[str, _Ending] = {}
        #: Seconds of a chain step by the number of sequences in it, rounded up to a power of two.
        self._step_seconds: dict[int, float] = {}

    def begin(self, request: Request) -> None:
        """Note the prompt's own tokens: they may be drafted whatever the draft vocabulary holds."""
        self._endings[request.id] = _Ending(tuple(sorted(set(request.prompt) - self._head.draft_tokens)))

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Keep the state behind the last token."""
        if hidden is None:
            msg = "the target gave no hidden states"
            raise ValueError(msg)
        ending = self._endings[request_id]
        ending.state, ending.token = hidden[-1], tokens[-1]

    def propose(self, limits: Mapping[str, int], stakes: Stakes = FREE_STAKES) -> Mapping[str, Draft]:
        """Walk ahead for all of them together."""
        known = [
            (request_id, limit, ending, ending.state)
            for request_id, limit in limits.items()
            if limit > 0 and (ending := self._endings[request_id]).state is not None
        ]
        if not known:
            return {}
        group = (len(known) - 1).bit_length()
        worth = stakes.token_seconds
        began = self._clock()
        drafts = self._head.draft(
            [state for _, _, _, state in known if state is not None],
            [ending.token for _, _, ending, _ in known],
            [ending.extras for _, _, ending, _ in known],
            min(self._longest, max(limit for _, limit, _, _ in known)),
            stakes.row_seconds / worth if worth else 0.0,
            self._step_seconds.get(group, 0.0) / worth / _GOES_ON if worth else 0.0,
        )
        self._learn(group, (self._clock() - began) / drafts.walked)
        return {
            request_id: Draft(tokens, (Source.HEAD,) * len(tokens), None, _evidence(sure)).cut(limit)
            for (request_id, limit, _, _), tokens, sure in zip(known, drafts.tokens, drafts.probabilities, strict=True)
        }

    def end(self, request_id: str) -> None:
        """Forget where it stood."""
        self._endings.pop(request_id, None)

    def _learn(self, group: int, seconds: float) -> None:
        known = self._step_seconds.get(group, seconds)
        self._step_seconds[group] = (
            min(seconds, known) if seconds < known else known + (1 - _FADING) * (seconds - known)
        )


#: Where a head's confidence passes from one kind of evidence to the next, and the kinds' priors: a trained head is about as
#: often right as it says.
_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
_PRIORS = (0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98)
_FAR = 3
_KINDS = {
    (place, step): Evidence(("head", place, step), prior)
    for place in range(_FAR + 1)
    for step, prior in enumerate(_PRIORS)
}


def _evidence(probabilities: Sequence[float]) -> tuple[Evidence, ...]:
    """By how far ahead a token is and how sure the head is of it."""
    return tuple(_KINDS[min(place, _FAR), bisect_right(_EDGES, sure)] for place, sure in enumerate(probabilities))
