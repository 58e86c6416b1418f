"""A decoder's weights in 8 bits, rotated and laid out for the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import CDLL, c_int32, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from ragspec.decoding.native import abi

#: Outputs that are computed together, and outputs of a panel of packed weights.
BLOCK, PANEL = 16, 64


class QuantizedLinear:
    """A weight matrix with one scale a row: `W R^T ~ scale[:, None] * q`, q in [-127, 127], R the rotation of its inputs.

    Args:
        kernels: the library.
        rounded: q, [outputs, inputs] in int8, contiguous.
        scale: [outputs].
        bias: [outputs] or None.

    Attributes:
        outputs: what a row of the product holds, rounded up to whole blocks.
        struct: for the kernels.
    """

    def __init__(self, kernels: CDLL, rounded: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = rounded.shape
        self._kernels = kernels
        self.outputs = _round_up(outputs, BLOCK)
        self._packed = torch.zeros(_round_up(outputs, PANEL) * inputs, dtype=torch.int8)
        kernels.ragspec_pack(
            c_void_p(rounded.data_ptr()), c_int32(outputs), c_int32(inputs), c_void_p(self._packed.data_ptr())
        )
        self._scale = _padded(scale, self.outputs)
        self._zero = _padded(rounded.sum(1, dtype=torch.int32) * 128, self.outputs)
        self._bias = None if bias is None else _padded(bias.float(), self.outputs)
        count, span = parts(inputs)
        self._mix = (cosines(count) / math.sqrt(span)).contiguous()
        self.struct = abi.Linear(
            self._packed.data_ptr(),
            self._scale.data_ptr(),
            self._zero.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            inputs,
            self.outputs,
            abi.Rotation(self._mix.data_ptr(), count, span),
        )

    @classmethod
    def of(cls, kernels: CDLL, weight: Tensor, bias: Tensor | None = None) -> QuantizedLinear:
        """Rotate and round a matrix [outputs, inputs]."""
        weight = rotate(weight.float())
        scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return cls(kernels, (weight / scale[:, None]).round().to(torch.int8).contiguous(), scale, bias)

    def taking(self, rows: Sequence[int]) -> QuantizedLinear:
        """A matrix of some of the rows, the same to the bit, without biases."""
        return QuantizedLinear(self._kernels, self._rounded(rows), self._scale[list(rows)])

    def unpacked(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Some of the rows as they lie side by side: q [n, inputs], scale [n], and 128 times the sum of each, [n]."""
        wanted = list(rows)
        return self._rounded(rows), self._scale[wanted], self._zero[wanted]

    def dequantized(self, rows: Sequence[int]) -> Tensor:
        """Some of the rows in float32 and turned back, [n, inputs]."""
        turned = self._rounded(rows).float() * self._scale[list(rows)][:, None]
        return turned @ rotate(torch.eye(turned.shape[1])).T

    def _rounded(self, rows: Sequence[int]) -> Tensor:
        """Some of the rows as they were packed, [n, inputs]; see `ragspec_pack`."""
        wanted = torch.tensor(rows, dtype=torch.long)
        panels = self._packed.view(-1, self.struct.inputs // 4, PANEL, 4)
        return panels[wanted // PANEL, :, wanted % PANEL].reshape(len(rows), self.struct.inputs).contiguous()


def parts(inputs: int) -> tuple[int, int]:
    """How a row of `inputs` numbers is rotated: so many parts, of so many numbers (a power of two) each."""
    span = inputs & -inputs
    return inputs // span, span


def mixable(inputs: int) -> bool:
    """Whether the kernels can rotate rows of this width."""
    count, span = parts(inputs)
    return span >= 16 and count <= abi.MOST_PARTS and inputs <= abi.MOST_INPUTS


def rotate(rows: Tensor) -> Tensor:
    """Rotate rows [n, inputs] as rotate.h does: Hadamard matrices over the parts, a cosine transform across them."""
    count, span = parts(rows.shape[1])
    turned = _hadamard(rows.reshape(-1, count, span)) / math.sqrt(span)
    return torch.einsum("ij,njs->nis", cosines(count), turned).reshape(rows.shape)


def _round_up(width: int, unit: int) -> int:
    return -(-width // unit) * unit


@lru_cache
def cosines(size: int) -> Tensor:
    """The orthonormal cosine transform (DCT-II), [size, size]."""
    row, column = torch.arange(size)[:, None], torch.arange(size)[None]
    matrix = torch.cos(math.pi / size * (column + 0.5) * row) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def _hadamard(rows: Tensor) -> Tensor:
    """The last dimension times Sylvester's matrix of ones and minus ones, by butterflies."""
    span, step = rows.shape[-1], 1
    while step < span:
        low, high = rows.reshape(*rows.shape[:-1], -1, 2, step).unbind(-2)
        rows = torch.stack((low + high, low - high), -2).reshape(rows.shape)
        step *= 2
    return rows


def _padded(values: Tensor, length: int) -> Tensor:
    out = torch.zeros(length, dtype=values.dtype)
    out[: len(values)] = values
    return out
