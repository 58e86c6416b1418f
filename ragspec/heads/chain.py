"""Any head as a drafter's chain, in torch, on the target's device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ragspec.decoding.head_drafter import Drafts
from ragspec.decoding.target import Target
from ragspec.heads.architecture import Head

#: Prompts whose extra rows are kept.
_KEPT_PROMPTS = 128


class TorchChain:
    """A head that drafts for a target; see `ragspec.decoding.head_drafter.ChainHead`.

    Args:
        head: moved to the target's device, in bfloat16 on CUDA and float32 elsewhere.
        target: gives its embeddings, and a copy of its output rows of the draft vocabulary.

    Attributes:
        draft_tokens: the draft vocabulary.
    """

    def __init__(self, head: Head, target: Target) -> None:
        self._dtype = torch.bfloat16 if target.device.type == "cuda" else torch.float32
        self._head = head.to(target.device, self._dtype)
        self._target = target
        self._tokens = torch.tensor(head.shape.draft_tokens, device=target.device)
        self._output = target.output_rows(head.shape.draft_tokens).to(self._dtype)
        self.draft_tokens = frozenset(head.shape.draft_tokens)
        #: Output rows of each prompt's extras, [n, hidden]: a prompt's are asked for in every step of its answer.
        self._rows = lru_cache(maxsize=_KEPT_PROMPTS)(self._extra_rows)

    def draft(
        self,
        states: Sequence[Tensor],
        tokens: Sequence[int],
        extras: Sequence[tuple[int, ...]],
        steps: int,
        row_price: float,
        step_price: float,
    ) -> Drafts:
        """See `ragspec.decoding.head_drafter.ChainHead`."""
        state = torch.stack(tuple(states)).to(self._dtype)
        last = list(tokens)
        survival = [1.0] * len(tokens)
        found: list[list[int]] = [[] for _ in tokens]
        certain: list[list[float]] = [[] for _ in tokens]
        walked = 0
        while walked < steps:
            state = self._head.advance(state, self._target.embedding_rows(last).to(self._dtype), walked)
            chosen, sure = self._choose(self._head.features(state, walked), extras)
            last = chosen.tolist()
            promise = 0.0
            for row, (token, probability) in enumerate(zip(last, sure.tolist(), strict=True)):
                if len(found[row]) < walked:
                    continue
                survival[row] *= probability
                if survival[row] >= row_price:
                    found[row].append(token)
                    certain[row].append(probability)
                    promise += survival[row] - row_price
            walked += 1
            if not (promise > 0 and promise >= step_price):
                break
        return Drafts([tuple(row) for row in found], [tuple(row) for row in certain], walked)

    def _choose(self, features: Tensor, extras: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row and its probability, [rows] each."""
        scores = (features @ self._output.T).float()
        best = scores.max(-1)
        tokens, top, total = self._tokens[best.indices], best.values, scores.logsumexp(-1)
        for row, own in enumerate(extras):
            if own:
                beside = (self._rows(own) @ features[row]).float()
                total[row] = torch.logaddexp(total[row], beside.logsumexp(-1))
                highest = int(beside.argmax())
                if beside[highest] > top[row]:
                    tokens[row], top[row] = own[highest], beside[highest]
        return tokens, (top - total).exp()

    def _extra_rows(self, tokens: tuple[int, ...]) -> Tensor:
        return self._target.output_rows(tokens).to(self._dtype)
