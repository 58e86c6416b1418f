"""Keys and values as the kernels read them."""

from __future__ import annotations

import torch

from ragspec.decoding.native.abi import KEY_BLOCK


class PackedCache:
    """Keys and values of every layer in bfloat16, `[layers, slots, key_heads, capacity * head_dim]` each.

    Within a slot and head, keys lie as `[capacity / 64, head_dim / 2, 64, 2]` and values as `[capacity / 2, head_dim, 2]`: the
    order in which attend.cpp multiplies them, so that a step copies and turns nothing. A slot's length is kept by its owner;
    what lies behind it is finite (zeros at first) and masked.

    Args:
        layers: of the model.
        slots: sequences held at once.
        key_heads: key heads of a layer.
        capacity: tokens a slot holds; rounded up to whole blocks.
        head_dim: of a key and of a value.

    Raises:
        RuntimeError: the memory does not suffice, in the allocator's words.
    """

    def __init__(self, *, layers: int, slots: int, key_heads: int, capacity: int, head_dim: int) -> None:
        self.slots = slots
        self.capacity = round_up(capacity)
        self._head_dim = head_dim
        shape = (layers, slots, key_heads, self.capacity * head_dim)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16)
        self.values = torch.zeros(shape, dtype=torch.bfloat16)

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` tokens of one slot into another."""
        # Keys go by blocks: the scores of those behind the prefix are masked, whatever they are. A value behind it has a weight
        # of 0, and must not come along in case it is none (0 times NaN).
        extent = round_up(length) * self._head_dim
        self.keys[:, destination, :, :extent] = self.keys[:, source, :, :extent]
        pairs = length // 2 * 2 * self._head_dim
        self.values[:, destination, :, :pairs] = self.values[:, source, :, :pairs]
        if length % 2:
            odd = slice(pairs, pairs + 2 * self._head_dim, 2)
            self.values[:, destination, :, odd] = self.values[:, source, :, odd]

    def clear(self, slot: int) -> None:
        """Wipe a slot whose sequence went wrong: values that are not finite would spoil the next one (0 times NaN)."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0


def round_up(tokens: int) -> int:
    """Tokens of the whole blocks that hold so many."""
    return -(-tokens // KEY_BLOCK) * KEY_BLOCK
