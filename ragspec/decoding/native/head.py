"""A recurrent speculation head in 8 bits, on the kernels of the target's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref
from itertools import accumulate

import torch
from torch import Tensor

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
        self._known = frozenset(draft_tokens)

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
        """Drafts of several sequences and the probability of each token; see `ragspec.decoding.head_drafter.ChainHead`."""
        rows = len(tokens)
        wide = torch.empty(rows * (2 * self._inner + self._linears[2].outputs))
        state = torch.stack(tuple(states))
        ids, flat = integers(tokens), integers([token for one in extras for token in one])
        starts = integers([0, *accumulate(len(one) for one in extras)])
        drafted, lengths = torch.empty(rows * steps, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
        probabilities = torch.empty(rows * steps)
        small = torch.empty(3 * rows)
        choices = torch.empty(rows, dtype=torch.int32)
        room = torch.empty(rows * max(2 * self._hidden, self._inner), dtype=torch.uint8)
        chain = abi.Chain(
            state.data_ptr(),
            ids.data_ptr(),
            flat.data_ptr(),
            starts.data_ptr(),
            drafted.data_ptr(),
            probabilities.data_ptr(),
            lengths.data_ptr(),
            small.data_ptr(),
            room.data_ptr(),
            small.data_ptr() + 4 * rows,
            wide.data_ptr(),
            wide.data_ptr() + 4 * rows * 2 * self._inner,
            choices.data_ptr(),
            small.data_ptr() + 8 * rows,
            rows,
            steps,
            torch.get_num_threads(),
            row_price,
            step_price,
        )
        self._decoder.kernels.ragspec_draft(byref(self._head), byref(chain))
        found, sure = drafted.tolist(), probabilities.tolist()
        out = []
        for row, length in enumerate(lengths.tolist()):
            part = slice(row * steps, row * steps + length)
            out.append((tuple(found[part]), tuple(sure[part])))
        return out
