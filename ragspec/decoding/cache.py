"""The key and value cache: one contiguous slot a sequence, ragged lengths kept by whoever owns the slot.

A slot's length is not stored here: a verify step writes the keys of its whole draft, and dropping the refused ones is only
the owner counting fewer of them (they are overwritten by the next step). Nothing is ever copied inside a step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of every layer, `[slots, kv_heads, capacity, dim]` each, made at a layer's first write.

    The first write tells heads and dimensions, so that models whose layers differ need no special case. On CPU the memory is
    reserved then but touched only as slots fill.

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
    def layers(self) -> int:
        """Layers that have written."""
        return len(self._keys)

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
            self._keys[layer] = self._reserve(keys)
            self._values[layer] = self._reserve(values)
        self._keys[layer][slots, :, positions] = keys[0].transpose(0, 1)
        self._values[layer][slots, :, positions] = values[0].transpose(0, 1)

    def read(self, layer: int, first_slot: int, last_slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of slots [first_slot, last_slot): keys and values `[slots * kv_heads, length, dim]`, no copy."""
        keys, values = self._keys[layer], self._values[layer]
        span = slice(first_slot * keys.shape[1], last_slot * keys.shape[1])
        return keys.flatten(0, 1)[span, :length], values.flatten(0, 1)[span, :length]

    def _reserve(self, like: Tensor) -> Tensor:
        # Zeros, not garbage: what lies behind a sequence's end is masked by a weight of 0, and 0 times NaN is NaN.
        shape = (self.slots, like.shape[1], self.capacity, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
