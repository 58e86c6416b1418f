"""Any head as a drafter's chain, in torch, on the target's device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragspec.decoding.head_drafter import Drafts, Ending, Reach
from ragspec.decoding.target import Target
from ragspec.heads.architecture import Head


@dataclass(frozen=True, slots=True)
class _Extras:
    """Tokens beside the draft vocabulary and their output rows, [n, hidden]."""

    tokens: list[int]
    rows: Tensor


class TorchChain:
    """A head that drafts for a target; see `ragspec.decoding.head_drafter.ChainHead`.

    Args:
        head: moved to the target's device, in bfloat16 on CUDA and float32 elsewhere.
        target: gives its embeddings, and a copy of its output rows of the draft vocabulary.
    """

    def __init__(self, head: Head, target: Target) -> None:
        self._dtype = torch.bfloat16 if target.device.type == "cuda" else torch.float32
        self._head = head.to(target.device, self._dtype)
        self._target = target
        self._tokens = torch.tensor(head.shape.draft_tokens, device=target.device)
        self._output = target.output_rows(head.shape.draft_tokens).to(self._dtype)
        self._vocabulary = frozenset(head.shape.draft_tokens)

    def extras(self, tokens: Iterable[int]) -> _Extras:
        """Those outside the draft vocabulary, with their output rows."""
        outside = sorted(set(tokens) - self._vocabulary)
        return _Extras(outside, self._target.output_rows(outside).to(self._dtype))

    def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
        """See `ragspec.decoding.head_drafter.ChainHead`."""
        state = torch.stack([ending.state for ending in endings]).to(self._dtype)
        last = [ending.token for ending in endings]
        extras: list[_Extras | None] = [ending.extras for ending in endings]
        survival = [1.0] * len(last)
        found: list[list[int]] = [[] for _ in last]
        certain: list[list[float]] = [[] for _ in last]
        walked = 0
        while walked < reach.steps:
            state = self._head.advance(state, self._target.embedding_rows(last).to(self._dtype), walked)
            chosen, sure = self._choose(self._head.features(state, walked), extras)
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

    def _choose(self, features: Tensor, extras: Sequence[_Extras | None]) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row and its probability, [rows] each."""
        scores = (features @ self._output.T).float()
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
