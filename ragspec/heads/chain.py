"""Heads as a drafter's chain, in torch, on the target's device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ragspec.decoding.head_drafter import Drafts, Ending, Reach
from ragspec.decoding.target import Target
from ragspec.heads.architecture import Head, StateHead

AnyHead = TypeVar("AnyHead", bound=Head)


@dataclass(frozen=True, slots=True)
class _Extras:
    """Tokens beside the draft vocabulary and their output rows, [n, hidden]."""

    tokens: list[int]
    rows: Tensor


class DraftRows:
    """The output rows that a head's drafts are chosen by: borrowed from the target, unless a head brings its own.

    Args:
        head: whose.
        target: whose rows are borrowed.
        own: the head's own, [draft vocabulary, width].
    """

    def __init__(self, head: Head, target: Target, own: Tensor | None = None) -> None:
        self._target = target
        self._dtype = chain_dtype(target)
        self._tokens = torch.tensor(head.shape.draft_tokens, device=target.device)
        self._rows = target.output_rows(head.shape.draft_tokens).to(self._dtype) if own is None else own
        self._vocabulary = frozenset(head.shape.draft_tokens)
        self._borrowed = own is None

    def extras(self, tokens: Iterable[int]) -> _Extras | None:
        """Those outside the draft vocabulary, with their output rows; a head's own rows are of other numbers than these."""
        if not self._borrowed:
            return None
        outside = sorted(set(tokens) - self._vocabulary)
        return _Extras(outside, self._target.output_rows(outside).to(self._dtype))

    def choose(self, features: Tensor, extras: Sequence[_Extras | None]) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row and its probability, [rows] each."""
        scores = (features @ self._rows.T).float()
        best = scores.max(-1)
        tokens, top, total = self._tokens[best.indices], best.values, scores.logsumexp(-1)
        for row, own in enumerate(extras):
            if own is not None and own.tokens:
                beside = (own.rows @ features[row]).float()
                total[row] = torch.logaddexp(total[row], beside.logsumexp(-1))
                highest = int(beside.argmax())
                if beside[highest] > top[row]:
                    tokens[row], top[row] = own.tokens[highest], beside[highest]
        return tokens, (top - total).exp()


class TorchChain:
    """A head that drafts for a target; see `ragspec.decoding.head_drafter.ChainHead`.

    Args:
        head: moved to the target's device, in bfloat16 on CUDA and float32 elsewhere.
        target: gives its embeddings, and a copy of its output rows of the draft vocabulary.
    """

    def __init__(self, head: StateHead, target: Target) -> None:
        self._head = placed(head, target)
        self._dtype = chain_dtype(target)
        self._target = target
        self._rows = DraftRows(head, target)

    def extras(self, tokens: Iterable[int]) -> _Extras | None:
        """Those outside the draft vocabulary, with their output rows."""
        return self._rows.extras(tokens)

    def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
        """See `ragspec.decoding.head_drafter.ChainHead`."""
        state = torch.stack([ending.state for ending in endings]).to(self._dtype)

        def features(last: list[int], place: int) -> Tensor:
            nonlocal state
            state = self._head.advance(state, self._target.embedding_rows(last).to(self._dtype), place)
            return self._head.features(state, place)

        return walk_ahead(features, self._rows, endings, reach)


def walk_ahead(
    features: Callable[[list[int], int], Tensor], rows: DraftRows, endings: Sequence[Ending], reach: Reach
) -> Drafts:
    """Draft for several sequences, each token the likeliest one, as far as it pays.

    Args:
        features: what the output rows are multiplied with, [sequences, width], behind the sequences' last tokens, of which so
            many were drafted before.
        rows: chooses.
        endings: where the sequences stand.
        reach: how far.
    """
    last = [ending.token for ending in endings]
    extras: list[_Extras | None] = [ending.extras for ending in endings]
    survival = [1.0] * len(last)
    found: list[list[int]] = [[] for _ in last]
    certain: list[list[float]] = [[] for _ in last]
    walked = 0
    while walked < reach.steps:
        chosen, sure = rows.choose(features(last, walked), extras)
        last = chosen.tolist()
        promise = 0.0
        for row, (token, probability) in enumerate(zip(last, sure.tolist(), strict=True)):
            if len(found[row]) < walked:
                continue
            survival[row] *= probability
            if survival[row] >= reach.row_price:
                found[row].append(token)
                certain[row].append(probability)
                promise += survival[row] - reach.row_price
        walked += 1
        if not (promise > 0 and promise >= reach.step_price):
            break
    return Drafts([tuple(row) for row in found], [tuple(row) for row in certain], walked)


def placed(head: AnyHead, target: Target) -> AnyHead:
    """A head where its target is, in the numbers that chains compute in."""
    return head.to(target.device, chain_dtype(target))


def chain_dtype(target: Target) -> torch.dtype:
    """bfloat16 on CUDA, float32 elsewhere."""
    return torch.bfloat16 if target.device.type == "cuda" else torch.float32
