"""The key and value cache: one contiguous slot a sequence, ragged lengths kept by whoever owns the slot.

A slot's length is not stored here: a verify step writes the keys of its whole draft, and dropping the refused ones is only
the owner counting fewer of them (they are overwritten by the next step). Nothing is ever copied inside a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What a layer's keys and values look like."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Memory of one token's key and value."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class SlotCache:
    """Keys and values of every layer, `[slots, kv_heads, capacity + 1, dim]` each.

    The place behind a slot's capacity is never read: what only pads a pass is written there.

    A layer's tensors are made by `reserve`, or else at its first write, which tells heads and dimensions: models whose layers
    differ need no special case. All of their memory is taken then, on CPU too, where torch writes the zeros.

    Args:
        slots: sequences held at once.
        capacity: tokens a slot holds.
    """

    def __init__(self, *, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def layout(self) -> dict[int, LayerLayout]:
        """The layers that have written."""
        return {
            layer: LayerLayout(keys.shape[1], keys.shape[3], self._values[layer].shape[3], keys.dtype, keys.device)
            for layer, keys in self._keys.items()
        }

    def reserve(self, layout: Mapping[int, LayerLayout]) -> None:
        """Make every layer's tensors now, so that memory that does not suffice shows before the first request.

        Raises:
            torch.OutOfMemoryError, RuntimeError: as the device's allocator says it.
        """
        for layer, of in layout.items():
            self._keys[layer] = self._zeros(of.kv_heads, of.key_dim, of.dtype, of.device)
            self._values[layer] = self._zeros(of.kv_heads, of.value_dim, of.dtype, of.device)

    def value_dim(self, layer: int) -> int:
        """Width of a layer's values."""
        return int(self._values[layer].shape[-1])

    def clear(self, slot: int) -> None:
        """Wipe a slot whose sequence went wrong: values that are not finite would spoil the next one (0 times NaN)."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[slot] = 0

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Give `destination` the first `length` tokens that `source` holds; what it holds behind them stays as it is."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[destination, :, :length] = tensor[source, :, :length]

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store a step's keys and values.

        Args:
            layer: whose.
            slots: slot of each token, int64 [n].
            positions: place of each token in its slot, int64 [n].
            keys: [1, kv_heads, n, head_dim].
            values: [1, kv_heads, n, value_dim].
        """
        if layer not in self._keys:
            self._keys[layer] = self._zeros(keys.shape[1], keys.shape[3], keys.dtype, keys.device)
            self._values[layer] = self._zeros(values.shape[1], values.shape[3], values.dtype, values.device)
        self._keys[layer][slots, :, positions] = keys[0].transpose(0, 1)
        self._values[layer][slots, :, positions] = values[0].transpose(0, 1)

    def read(self, layer: int, first_slot: int, last_slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of slots [first_slot, last_slot): keys and values `[slots * kv_heads, length, dim]`, no copy."""
        keys, values = self._keys[layer], self._values[layer]
        span = slice(first_slot * keys.shape[1], last_slot * keys.shape[1])
        return keys.flatten(0, 1)[span, :length], values.flatten(0, 1)[span, :length]

    def _zeros(self, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Zeros, not garbage: what lies behind a sequence's end is masked by a weight of 0, and 0 times NaN is NaN.
        return torch.zeros((self.slots, heads, self.capacity + 1, dim), dtype=dtype, device=device)
