"""Drafts and what makes them. A drafter can only cost time: whatever it does wrong, the output stays the target's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ragspec.decoding.acceptance import Source
from ragspec.decoding.request import Request


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a sequence.

    Attributes:
        tokens: in order, [k].
        sources: who proposed each, [k].
        probabilities: the drafter's own distribution at each place, [k, vocabulary], where the tokens were sampled from
            one; None where they are certain (copied, or a head's argmax).
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    probabilities: Tensor | None = None

    def cut(self, limit: int) -> Draft:
        """The first `limit` tokens."""
        if len(self.tokens) <= limit:
            return self
        probabilities = None if self.probabilities is None else self.probabilities[:limit]
        return Draft(self.tokens[:limit], self.sources[:limit], probabilities)


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
