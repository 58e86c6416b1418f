"""Drafting by a speculation head: a small network that walks ahead from the target's own hidden state."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

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
class Place:
    """Where a head that attends has a sequence's keys.

    Attributes:
        cache: what the head made.
        slot: of the sequence.
        position: of the state that it goes on from; those before are in the cache.
    """

    cache: Any
    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a sequence stands, for a head that is to go on from there.

    Attributes:
        state: the target's final hidden state that gave the last token, [hidden], or what a head made of its features.
        token: that last token.
        extras: what `ChainHead.extras` gave for the sequence.
        place: where its keys are, for a head that attends.
    """

    state: Tensor
    token: int
    extras: Any = None
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a chain goes.

    Attributes:
        steps: most tokens of a draft.
        row_price: a draft ends before the token that survives with less than this probability.
        step_price: all drafts end where the sum of what the survivors promise beyond `row_price` is less than this.
    """

    steps: int
    row_price: float = 0.0
    step_price: float = 0.0


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

    def extras(self, tokens: Iterable[int]) -> Any:
        """What lets a sequence draft these tokens too, where the draft vocabulary lacks them; for `Ending.extras`."""
        ...

    def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
        """Draft for several sequences at once, each token the likeliest one."""
        ...


@dataclass(slots=True)
class Known:
    """What is known of a sequence; its extras are made when it is first drafted for."""

    prompt: tuple[int, ...]
    state: Tensor | None = None
    token: int = 0
    position: int = 0
    extras: Any = None


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
        self._known: dict[str, Known] = {}
        #: Seconds of a chain step by the number of sequences in it, rounded up to a power of two.
        self._step_seconds: dict[int, float] = {}

    def begin(self, request: Request) -> None:
        """Note the prompt: its own tokens may be drafted whatever the draft vocabulary holds."""
        self._known[request.id] = Known(tuple(request.prompt))

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Keep the state behind the last token."""
        if hidden is None:
            msg = "the target gave no hidden states"
            raise ValueError(msg)
        known = self._known[request_id]
        known.state, known.token = hidden[-1], tokens[-1]

    def propose(self, limits: Mapping[str, int], stakes: Stakes = FREE_STAKES) -> Mapping[str, Draft]:
        """Walk ahead for all of them together."""
        asked = {i: limit for i, limit in limits.items() if limit > 0 and self.can_go_on(i)}
        if not asked:
            return {}
        group = (len(asked) - 1).bit_length()
        worth = stakes.token_seconds
        began = self._clock()
        reach = Reach(
            min(self._longest, max(asked.values())),
            stakes.row_seconds / worth if worth else 0.0,
            self._step_seconds.get(group, 0.0) / worth / _GOES_ON if worth else 0.0,
        )
        drafts = self._head.draft([self.ending(request_id) for request_id in asked], reach)
        self._learn(group, (self._clock() - began) / drafts.walked)
        return {
            request_id: Draft(tokens, (Source.HEAD,) * len(tokens), _evidence(sure)).cut(limit)
            for (request_id, limit), tokens, sure in zip(
                asked.items(), drafts.tokens, drafts.probabilities, strict=True
            )
        }

    def end(self, request_id: str) -> None:
        """Forget where it stood."""
        self._known.pop(request_id, None)

    def can_go_on(self, request_id: str) -> bool:
        """Whether a state is known from which to draft."""
        return self._known[request_id].state is not None

    def ending(self, request_id: str) -> Ending:
        """Where a sequence stands that a state is known of."""
        known = self._known[request_id]
        if known.extras is None:
            known.extras = self._head.extras(known.prompt)
        return Ending(cast("Tensor", known.state), known.token, known.extras)

    def _learn(self, group: int, seconds: float) -> None:
        # What disturbs a step makes it slower: a faster one is believed at once.
        known = self._step_seconds.get(group, seconds)
        self._step_seconds[group] = min(seconds, known + (1 - _FADING) * (seconds - known))


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
