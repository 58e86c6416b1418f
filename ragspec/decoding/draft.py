"""Drafts and what makes them. A drafter can only cost time: whatever it does wrong, the output stays the target's."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ragspec.decoding.acceptance import Source
from ragspec.decoding.request import Request
from ragspec.decoding.target import SlotKeeper


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speaks for a draft token, given that the tokens before it in the draft stand.

    Tokens with the same evidence are counted together, and the count says how likely the next such token is to be
    accepted (`ragspec.decoding.acceptance_rates`). A drafter sorts its tokens into a few dozen kinds at most: a
    lookup by the length of the match, a head by its own confidence in steps.

    Attributes:
        kind: tells kinds apart; begins with the drafter's name.
        prior: probability of acceptance before anything was counted, in (0, 1).
    """

    kind: Hashable
    prior: float

    def __post_init__(self) -> None:
        """Refuse what nothing could be counted by.

        Raises:
            ValueError: the prior is no probability between 0 and 1.
            TypeError: the kind is not hashable.
        """
        hash(self.kind)
        if not 0.0 < self.prior < 1.0:
            msg = f"prior {self.prior} of evidence {self.kind!r}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Stakes:
    """What draft tokens win and cost in a step, for a drafter that can draft more or less.

    Attributes:
        token_seconds: what a token that stands is worth; 0 where nobody measured.
        row_seconds: what verifying one more costs.
    """

    token_seconds: float = 0.0
    row_seconds: float = 0.0


#: Nobody measured: every token is worth drafting.
FREE_STAKES = Stakes()


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a sequence.

    Attributes:
        tokens: in order, [k].
        sources: who proposed each, [k].
        evidence: what speaks for each, [k]; empty where the drafter does not say.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    def cut(self, limit: int) -> Draft:
        """The first `limit` tokens."""
        if len(self.tokens) <= limit:
            return self
        return Draft(self.tokens[:limit], self.sources[:limit], self.evidence[:limit])

    def followed_by(self, other: Draft) -> Draft:
        """The tokens of both, all of which have evidence or none."""
        return Draft(self.tokens + other.tokens, self.sources + other.sources, self.evidence + other.evidence)


class Drafter(Protocol):
    """Proposes next tokens. The engine calls `begin`, then `observe` and `propose` in turns, then `end`.

    Any exception takes the drafter out for that request (its state may be stale); the request goes on without it.
    """

    name: str

    def begin(self, request: Request) -> None:
        """A request enters; its whole prompt is known."""
        ...

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Tokens were emitted.

        Args:
            request_id: whose.
            tokens: the new ones, in order.
            hidden: the target's final hidden state behind each of them, [len(tokens), hidden], or None where no drafter
                asked for it by a true attribute `wants_hidden`.
        """
        ...

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        """Drafts for several requests at once, each at most as long as its limit; a request may be left out."""
        ...

    def end(self, request_id: str) -> None:
        """A request left; forget it."""
        ...


class ExtendingDrafter(Drafter, Protocol):
    """A drafter that can go on where another's draft ends."""

    def extend(self, request_id: str, tokens: Sequence[int], limit: int) -> Draft:
        """What it would propose if those tokens had been emitted.

        Args:
            request_id: whose.
            tokens: another's draft, at least one.
            limit: most tokens behind it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a sequence stands before a step.

    Attributes:
        slot: of the cache.
        cached: its tokens in there.
    """

    slot: int
    cached: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of a sequence that a step has put into the cache and that stand.

    Attributes:
        request_id: whose.
        slot: of the cache.
        start: the first one's position in the sequence.
        following: the token behind each of them, [n]: of the last one the prompt's next, or what was emitted last.
    """

    request_id: str
    slot: int
    start: int
    following: tuple[int, ...]


class FeatureDrafter(Drafter, SlotKeeper, Protocol):
    """A drafter that reads the target's hidden states of every token, and keeps what it makes of them in a cache of its own.

    That cache has the target's slots: a prefix that is copied from slot to slot is copied there too, and what is refused is
    overwritten in both. So the engine has it made before the first request, and tells of every sequence, begun or not.
    """

    @property
    def features(self) -> tuple[int, ...]:
        """The layers whose inputs it reads; see `Target.forward`."""
        ...

    def follow(self, stretches: Sequence[Stretch], features: Tensor) -> None:
        """A step is over.

        Args:
            stretches: what it computed, without refused drafts.
            features: the inputs of the layers asked for, of the stretches' tokens one after another, [n, layers, hidden].
        """
        ...

    def locate(self, standings: Mapping[str, Standing]) -> None:
        """Where the sequences stand that decode in the step to come: one that was preempted may have another slot than before,
        and of an interrupted step nothing was told.
        """
        ...


class CostlyDrafter(Drafter, Protocol):
    """A drafter whose `propose` takes time worth counting.

    It is asked after the others, for the requests that those leave open and while that pays.
    """

    @property
    def costly(self) -> bool:
        """True: what tells it from the others."""
        ...

    def propose(self, limits: Mapping[str, int], stakes: Stakes = FREE_STAKES) -> Mapping[str, Draft]:
        """See `Drafter.propose`; the stakes say how far drafting pays."""
        ...
