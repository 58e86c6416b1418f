"""Any head as a drafter's chain, in torch, on the target's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragspec.decoding.target import Target
from ragspec.heads.architecture import Head


class TorchChain:
    """A head that drafts for a target; see `ragspec.decoding.head_drafter.ChainHead`.

    Args:
        head: its weights are copied to the target's device, in bfloat16 on CUDA.
        target: its embeddings and output rows are shared where it has them in torch.
    """

    def __init__(self, head: Head, target: Target) -> None:
        dtype = torch.bfloat16 if target.device.type == "cuda" else torch.float32
        self._head = head.to(target.device, dtype)
        self._target = target
        self._tokens = torch.tensor(head.shape.draft_tokens, device=target.device)
        self._output = target.output_rows(head.shape.draft_tokens).to(dtype)
        self._known = frozenset(head.shape.draft_tokens)

    def extras(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Of a prompt's tokens those that the draft vocabulary lacks."""
        return tuple(sorted(set(tokens) - self._known))

    def draft(
        self,
        states: Sequence[Tensor],
        tokens: Sequence[int],
        extras: Sequence[tuple[int, ...]],
        steps: int,
        row_price: float,
        step_price: float,
    ) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Drafts of several sequences and the probability of each token."""
        dtype = self._output.dtype
        state = torch.stack(tuple(states)).to(dtype)
        last = torch.tensor(tokens, device=state.device)
        beside = sorted({token for one in extras for token in one})
        rows, names, barred = self._output, self._tokens, None
        if beside:
            rows = torch.cat((rows, self._target.output_rows(beside).to(dtype)))
            names = torch.cat((names, torch.tensor(beside, device=names.device)))
            own = [set(one) for one in extras]
            barred = torch.tensor([[token not in mine for token in beside] for mine in own], device=names.device)
        survival = [1.0] * len(tokens)
        drafts: list[tuple[list[int], list[float]]] = [([], []) for _ in tokens]
        for place in range(steps):
            state = self._head.advance(state, self._target.embedding_rows(last.tolist()).to(dtype), place)
            scores = (self._head.features(state, place) @ rows.T).float()
            if barred is not None:
                scores[:, len(self._tokens) :].masked_fill_(barred, -torch.inf)
            best = scores.max(-1)
            last = names[best.indices]
            sure = (best.values - scores.logsumexp(-1)).exp().tolist()
            promise = 0.0
            for row, (token, probability) in enumerate(zip(last.tolist(), sure, strict=True)):
                if len(drafts[row][0]) < place:
                    continue
                survival[row] *= probability
                if survival[row] >= row_price:
                    drafts[row][0].append(token)
                    drafts[row][1].append(probability)
                    promise += survival[row] - row_price
            if not promise >= step_price:
                break
        return [(tuple(found), tuple(certain)) for found, certain in drafts]
