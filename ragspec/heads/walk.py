"""A head beside what the target wrote: what training and measuring share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ragspec.decoding.target import Target
from ragspec.heads.architecture import Head, StateHead
from ragspec.heads.batches import Positions, positions
from ragspec.heads.store import Answers


@dataclass(frozen=True, slots=True, eq=False)
class FrozenRows:
    """What a head borrows from the target.

    Attributes:
        embedding: of every token, [vocabulary, hidden].
        output: the output rows of the draft vocabulary, [draft vocabulary, hidden].
        tokens: the draft vocabulary, [draft vocabulary].
    """

    embedding: Tensor
    output: Tensor
    tokens: Tensor


def frozen_rows(
    target: Target, head: Head, dtype: torch.dtype = torch.bfloat16, embedding: Tensor | None = None
) -> FrozenRows:
    """Copies of the target's rows, for a head; of an `embedding` that the head brings itself, no copy."""
    draft_tokens = head.shape.draft_tokens
    return FrozenRows(
        target.embedding_rows(range(target.vocabulary)).to(dtype) if embedding is None else embedding,
        target.output_rows(draft_tokens).to(dtype),
        torch.tensor(draft_tokens, device=target.device),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One place of many drafts.

    Attributes:
        rows: which of the batch's positions got here: all before was drafted right, [m], on CPU.
        scores: the head's logits over the draft vocabulary, [m, draft vocabulary].
        expected: the target's, [m, draft vocabulary].
        accepted: whether the head's likeliest token is what the target wrote, [m], on CPU.
    """

    rows: Tensor
    scores: Tensor
    expected: Tensor
    accepted: Tensor

    def alive(self, batch: Positions, place: int) -> Tensor:
        """Of the rows, whether the draft goes on to the next place, [m]."""
        return self.accepted & (batch.ahead[self.rows] > place + 1)


def judged(frozen: FrozenRows, batch: Positions, rows: Tensor, place: int, scores: Tensor) -> Place:
    """What a head says at a place of its drafts beside what the target wrote there.

    Args:
        frozen: the target's rows.
        batch: where the drafts began.
        rows: which of them got here, [m].
        place: how many tokens were drafted before.
        scores: the head's logits, [m, draft vocabulary].
    """
    answers, written = batch.answers, batch.places[rows] + place + 1
    with torch.no_grad():
        expected = answers.hidden[written].to(frozen.output) @ frozen.output.T
        accepted = frozen.tokens[scores.argmax(-1)].cpu() == answers.tokens[written]
    return Place(rows, scores, expected, accepted)


class Walker(Protocol):
    """Leads a head along what the target wrote."""

    @property
    def head(self) -> Head:
        """Whom."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is done."""
        ...

    def positions(self, answers: Answers, *, held_back: bool) -> Positions:
        """Every place that a draft can begin behind, in the answers to train on or in those held back; see `positions`.

        Raises:
            InputError: the answers lack what the head reads (code `no_head_data`).
        """
        ...

    def walk(self, batch: Positions, depth: int) -> Iterator[Place]:
        """Draft behind each position, place by place, for as long as the draft would stand.

        What a head says behind a wrong token is never emitted, so nothing is asked of it there. And as long as it is right its
        own tokens are the target's, so training on the target's tokens is the training-time test of EAGLE-3 (arXiv 2503.01840):
        states are the head's own from the second place on.

        Args:
            batch: where from; it came out of `positions`.
            depth: most places.
        """
        ...


class StateWalker:
    """Of a head that walks from the final state alone.

    Args:
        head: drafts.
        target: whose rows it borrows.
    """

    def __init__(self, head: StateHead, target: Target) -> None:
        self.head = head
        self.device = target.device
        self._frozen = frozen_rows(target, head)

    def positions(self, answers: Answers, *, held_back: bool) -> Positions:
        """See `Walker`."""
        return positions(answers, held_back=held_back)

    def walk(self, batch: Positions, depth: int) -> Iterator[Place]:
        """See `Walker`."""
        tokens, hidden = batch.answers.tokens, batch.answers.hidden
        output, embedding = self._frozen.output, self._frozen.embedding
        rows = torch.arange(len(batch.places))
        state = hidden[batch.places].to(output)
        for place in range(depth):
            here = batch.places[rows] + place
            state = self.head.advance(state, embedding[tokens[here].to(self.device, torch.long)], place)
            at = judged(self._frozen, batch, rows, place, self.head.features(state, place) @ output.T)
            yield at
            alive = at.alive(batch, place)
            rows, state = rows[alive], state[alive.to(self.device)]
            if not len(rows):
                return
