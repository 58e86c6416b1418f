"""Where each token of a packed step lies, and how its short segments are padded for attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ragspec.decoding.attention import Rule, Segment, attend_chunk, attend_padded, visibility
from ragspec.decoding.cache import SlotCache

#: Segments up to this length are padded into one batched product, as wide as the longest; longer ones run alone. A verify step
#: is 1 + max_draft long at most, 11 at the default, and a prompt's tail beyond that should not widen the whole batch.
BATCHED_LENGTH = 12


class StepPlan:
    """The plan of a packed step of any segments; built once a step.

    Args:
        cache: where the sequences live.
        segments: the step's segments in packed order.
        tokens: their new tokens.
        rows: packed places whose logits are wanted.
        device: of the model.
        dtype: of the attention bias, the model's own.
    """

    def __init__(
        self,
        cache: SlotCache,
        segments: Sequence[Segment],
        tokens: Sequence[int],
        rows: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.cache = cache
        self.segments = tuple(segments)
        self.dtype = dtype
        self.offsets = [0]
        for segment in segments:
            self.offsets.append(self.offsets[-1] + segment.length)
        short = [i for i, s in enumerate(segments) if s.length <= BATCHED_LENGTH]
        self.alone = [i for i, s in enumerate(segments) if s.length > BATCHED_LENGTH]
        positions = [place for s in segments for place in range(s.start, s.end)]
        slots = [s.slot for s in segments for _ in range(s.length)]
        padded = _pad(self, short) if short else _Padded()
        numbers = (tokens, rows, positions, slots, padded.gather, padded.ends, padded.packed, padded.scatter)
        self.tokens, self.rows, self.positions, self.slots, *indices = upload(numbers, device)
        self.places = self.positions
        self.batch = _Batch(padded, indices, dtype) if short else None

    def attend(self, layer: int, queries: Tensor, rule: Rule) -> Tensor:
        """See `Plan.attend`."""
        out = queries.new_empty((queries.shape[1], queries.shape[0], self.cache.value_dim(layer)))
        for i in self.alone:
            segment, rows = self.segments[i], slice(self.offsets[i], self.offsets[i + 1])
            keys, values = self.cache.read(layer, segment.slot, segment.slot + 1, segment.end)
            out[rows] = attend_chunk(queries[:, rows], keys, values, rule, self.dtype)
        if self.batch is not None:
            batch, padded = self.batch, self.batch.padded
            keys, values = self.cache.read(layer, padded.first_slot, padded.last_slot, padded.context)
            attended = attend_padded(queries[:, batch.gather], keys, values, batch.bias(rule.window), rule)
            out[batch.packed] = attended[batch.scatter]
        return out


def spans(segments: Iterable[Segment], first_slot: int, width: int) -> list[slice]:
    """Where the tokens of each segment lie in a padded pass: every slot from the first on has so many places there."""
    return [slice(first := (s.slot - first_slot) * width, first + s.length) for s in segments]


@dataclass(frozen=True, slots=True)
class _Padded:
    """Short segments, padded to one width over a contiguous range of slots.

    Attributes:
        first_slot, last_slot: the range, its end excluded.
        width: tokens of each slot.
        context: how far back the longest reaches.
        gather: packed place of each padded token, [rows * width].
        ends: its position, [rows * width].
        packed: packed places of the segments' tokens, [n].
        scatter: padded place of each of them, [n].
    """

    first_slot: int = 0
    last_slot: int = 0
    width: int = 0
    context: int = 0
    gather: Sequence[int] = ()
    ends: Sequence[int] = ()
    packed: Sequence[int] = ()
    scatter: Sequence[int] = ()


def _pad(plan: StepPlan, members: list[int]) -> _Padded:
    segments = [plan.segments[i] for i in members]
    first_slot, last_slot = min(s.slot for s in segments), max(s.slot for s in segments) + 1
    width = max(s.length for s in segments)
    # Padding and idle slots read the packed row's token 0 and look at position 0: finite, and thrown away.
    gather, ends = [0] * (last_slot - first_slot) * width, [0] * (last_slot - first_slot) * width
    packed: list[int] = []
    scatter: list[int] = []
    for i, segment, here in zip(members, segments, spans(segments, first_slot, width), strict=True):
        gather[here] = range(plan.offsets[i], plan.offsets[i + 1])
        ends[here] = range(segment.start, segment.end)
        packed += range(plan.offsets[i], plan.offsets[i + 1])
        scatter += range(here.start, here.stop)
    return _Padded(first_slot, last_slot, width, max(s.end for s in segments), gather, ends, packed, scatter)


class _Batch:
    """The short segments of a step on the device.

    Args:
        padded: how they are padded.
        indices: its last four attributes on the device.
        dtype: of the bias.
    """

    def __init__(self, padded: _Padded, indices: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.padded = padded
        self.gather, ends, self.packed, self.scatter = indices
        self._ends = ends.view(-1, padded.width)
        self._dtype = dtype
        self._bias: dict[int | None, Tensor] = {}

    def bias(self, window: int | None) -> Tensor:
        """0 where a query may look and -inf elsewhere, `[rows, 1, 1, width, context]`; the same for every head."""
        if window not in self._bias:
            self._bias[window] = visibility(self._ends, self.padded.context, window, self._dtype)
        return self._bias[window]


def on_host(numbers: Iterable[Sequence[int]], device: torch.device) -> Tensor:
    """Integers end to end, int64; pinned where they are for CUDA, so that a copy there is not waited for.

    torch's allocator gives pinned memory to nobody else before the copy is over.
    """
    flat = torch.tensor(list(chain.from_iterable(numbers)), dtype=torch.long)
    return flat.pin_memory() if device.type == "cuda" else flat


def upload(numbers: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Integers on a device, a tensor for each sequence, in one transfer."""
    arrived = on_host(numbers, device).to(device, non_blocking=True)
    parts: tuple[Tensor, ...] = torch.split(arrived, [len(one) for one in numbers])
    return parts
