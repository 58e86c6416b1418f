"""A recurrent speculation head in 8 bits, on the kernels of the target's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ctypes import addressof, byref

import numpy as np
import torch
from torch import Tensor

from ragspec.decoding.head_drafter import Drafts, Ending, Reach
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
            *(norm.data_ptr() for norm in self._norms),
            decoder.embedding.data_ptr(),
            self._tokens.data_ptr(),
            self._hidden,
            self._inner,
            len(draft_tokens),
            epsilon,
        )
        self._vocabulary = frozenset(draft_tokens)
        self._room = self._make_room(1, 1)
        self._nothing = _Extras(decoder.output, ())

    def extras(self, tokens: Iterable[int]) -> _Extras:
        """Those outside the draft vocabulary, with their rows of the output matrix."""
        return _Extras(self._decoder.output, sorted(set(tokens) - self._vocabulary))

    def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
        """See `ragspec.decoding.head_drafter.ChainHead`."""
        rows, steps = len(endings), reach.steps
        if rows > self._room.rows or steps > self._room.steps:
            self._room = self._make_room(max(rows, self._room.rows), max(steps, self._room.steps))
        room = self._room
        # Plain arrays, row by row: a torch operator takes longer to start than these few numbers to move.
        beside = (abi.Extras * rows)()
        for row, ending in enumerate(endings):
            room.states[row] = ending.state.numpy()
            beside[row] = (ending.extras or self._nothing).struct
        room.ids[:rows] = [ending.token for ending in endings]
        chain = room.chain
        chain.extras = addressof(beside)
        chain.rows, chain.steps, chain.threads = rows, steps, torch.get_num_threads()
        chain.row_price, chain.step_price = reach.row_price, reach.step_price
        self._decoder.kernels.ragspec_draft(byref(self._head), byref(chain))
        *kept, walked = room.lengths[: rows + 1].tolist()
        found, sure = room.drafted[: rows * steps].tolist(), room.probabilities[: rows * steps].tolist()
        parts = [slice(row * steps, row * steps + length) for row, length in enumerate(kept)]
        return Drafts([tuple(found[part]) for part in parts], [tuple(sure[part]) for part in parts], walked)

    def _make_room(self, rows: int, steps: int) -> _Room:
        return _Room(rows, steps, self._hidden, self._inner, self._linears[2].outputs)


class _Extras:
    """A prompt's own tokens beside the draft vocabulary: their rows of the output matrix, side by side.

    The packed matrix has a row's numbers 256 bytes apart: to read a hundred rows there took longer than the rest of a step.
    """

    def __init__(self, output: QuantizedLinear, tokens: Sequence[int]) -> None:
        self._kept = (*output.unpacked(tokens), integers(tokens))
        self.struct = abi.Extras(*(kept.data_ptr() for kept in self._kept), len(tokens))


class _Room:
    """Memory for the drafts of up to so many sequences, and the structure that points to it.

    Args:
        rows: most sequences.
        steps: most tokens of a draft.
        hidden: width of a state.
        inner: width of the head's layer.
        outputs: of the output matrix.
    """

    def __init__(self, rows: int, steps: int, hidden: int, inner: int, outputs: int) -> None:
        self.rows, self.steps = rows, steps
        self.states = np.empty((rows, hidden), np.float32)
        self.ids, self.lengths, self._choices, self.drafted = (
            np.empty(count, np.int32) for count in (rows, rows + 1, rows, rows * steps)
        )
        self.probabilities, self._survival, self._scales, self._normalizers, self._wide, self._logits = (
            np.empty(count, np.float32) for count in (rows * steps, rows, rows, rows, rows * 2 * inner, rows * outputs)
        )
        self._bytes = np.empty(rows * max(2 * hidden, inner), np.uint8)
        self.chain = abi.Chain(
            states=self.states.ctypes.data,
            ids=self.ids.ctypes.data,
            drafted=self.drafted.ctypes.data,
            probabilities=self.probabilities.ctypes.data,
            lengths=self.lengths.ctypes.data,
            survival=self._survival.ctypes.data,
            bytes=self._bytes.ctypes.data,
            scales=self._scales.ctypes.data,
            wide=self._wide.ctypes.data,
            logits=self._logits.ctypes.data,
            choices=self._choices.ctypes.data,
            normalizers=self._normalizers.ctypes.data,
        )
