"""A head beside what the target wrote: the one computation that training and measuring share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ragspec.decoding.target import Target
from ragspec.heads.architecture import StateHead
from ragspec.heads.batches import Positions


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


def frozen_rows(target: Target, head: StateHead, dtype: torch.dtype = torch.bfloat16) -> FrozenRows:
    """Copies of the target's rows, for a head."""
    draft_tokens = head.shape.draft_tokens
    return FrozenRows(
        target.embedding_rows(range(target.vocabulary)).to(dtype),
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


def walk(head: StateHead, frozen: FrozenRows, batch: Positions, depth: int) -> Iterator[Place]:
    """Draft behind each position, place by place, for as long as the draft would stand.

    What a head says behind a wrong token is never emitted, so nothing is asked of it there. And as long as it is right its own
    tokens are the target's, so here, unlike with a head that reads its own features, training on the target's tokens is the
    training-time test of EAGLE-3 (arXiv 2503.01840): states are the head's own from the second place on.

    Args:
        head: drafts.
        frozen: the target's rows.
        batch: where from.
        depth: most places.
    """
    tokens, hidden = batch.answers.tokens, batch.answers.hidden
    device, dtype = frozen.output.device, frozen.output.dtype
    rows = torch.arange(len(batch.places))
    state = hidden[batch.places].to(device, dtype)
    for place in range(depth):
        here = batch.places[rows] + place
        state = head.advance(state, frozen.embedding[tokens[here].to(device, torch.long)], place)
        scores = head.features(state, place) @ frozen.output.T
        with torch.no_grad():
            expected = hidden[here + 1].to(device, dtype) @ frozen.output.T
            accepted = frozen.tokens[scores.argmax(-1)].cpu() == tokens[here + 1]
        yield Place(rows, scores, expected, accepted)
        alive = accepted & (batch.ahead[rows] > place + 1)
        rows, state = rows[alive], state[alive.to(device)]
        if not len(rows):
            return
