"""A recurrent speculation head in 8 bits, on the kernels of the target's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref
from itertools import accumulate

import torch
from torch import Tensor

from ragspec.decoding.head_drafter import Drafts
from ragspec.decoding.native import abi
from ragspec.decoding.native.decoder import Decoder, integers
from ragspec.decoding.native.weights import QuantizedLinear


class NativeHead:
    """The kernels' own copy of a recurrent head (`ragspec.heads.recurrent`).

    Args:
        weights: `state_norm`, `token_norm`, `output_norm` [hidden], `gate_up` [2 * inner, 2 * hidden], `down` [hidden, inner].
        draft_tokens: the draft vocabulary.
        decoder: the target's, whose embeddings and output rows serve the head.
        epsilon: of the norms.

    Attributes:
        draft_tokens: the draft vocabulary.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        draft_tokens: Sequence[int],
        decoder: Decoder,
        epsilon: float,
    ) -> None:
        self._decoder = decoder
        self._hidden = decoder.hidden
        self._inner = weights["down"].shape[1]
        kernels = decoder.kernels
        self._linears = [
            QuantizedLinear.of(kernels, weights["gate_up"]),
            QuantizedLinear.of(kernels, weights["down"]),
            decoder.output.taking(draft_tokens),
        ]
        self._norms = [weights[f"{name}_norm"].float().contiguous().clone() for name in ("state", "token", "output")]
        self._tokens = torch.tensor(draft_tokens, dtype=torch.int32)
        self._head = abi.Head(
            *(linear.struct for linear in self._linears),
            decoder.output.struct,
            *(norm.data_ptr() for norm in self._norms),
            decoder.embedding.data_ptr(),
            self._tokens.data_ptr(),
            self._hidden,
            self._inner,
            len(draft_tokens),
            epsilon,
        )
        self.draft_tokens = frozenset(draft_tokens)

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
        rows, threads = len(tokens), torch.get_num_threads()
        state = torch.stack(tuple(states))
        ids, flat = integers(tokens), integers([token for one in extras for token in one])
        starts = integers([0, *accumulate(len(one) for one in extras)])
        drafted, choices, lengths = (torch.empty(count, dtype=torch.int32) for count in (rows * steps, rows, rows + 1))
        probabilities, survival, scales, normalizers = (
            torch.empty(count) for count in (rows * steps, rows, rows, rows)
        )
        wide, logits = torch.empty(rows * 2 * self._inner), torch.empty(rows * self._linears[2].outputs)
        room = torch.empty(rows * max(2 * self._hidden, self._inner), dtype=torch.uint8)
        chain = abi.Chain(
            states=state.data_ptr(),
            ids=ids.data_ptr(),
            extras=flat.data_ptr(),
            extra_starts=starts.data_ptr(),
            drafted=drafted.data_ptr(),
            probabilities=probabilities.data_ptr(),
            lengths=lengths.data_ptr(),
            survival=survival.data_ptr(),
            bytes=room.data_ptr(),
            scales=scales.data_ptr(),
            wide=wide.data_ptr(),
            logits=logits.data_ptr(),
            choices=choices.data_ptr(),
            normalizers=normalizers.data_ptr(),
            rows=rows,
            steps=steps,
            threads=threads,
            row_price=row_price,
            step_price=step_price,
        )
        self._decoder.kernels.ragspec_draft(byref(self._head), byref(chain))
        *kept, walked = lengths.tolist()
        found, sure = drafted.tolist(), probabilities.tolist()
        parts = [slice(row * steps, row * steps + length) for row, length in enumerate(kept)]
        return Drafts([tuple(found[part]) for part in parts], [tuple(sure[part]) for part in parts], walked)
