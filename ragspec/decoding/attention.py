"""Attention of a packed, ragged step over the slot cache, registered with transformers as `ragspec`.

A step packs the new tokens of all sequences into one row, so that every matrix product of the model runs once over all of
them: prompt chunks and verify steps share it. Only attention has to tell sequences apart, and it does so here. The query heads
that share a key head are folded into the query length, `[kv_heads, group * n, d] @ [kv_heads, d, T]`: repeating keys and
values instead, as stock attention does, costs four to nine times as much on CPU (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from ragspec.decoding.cache import SlotCache

#: The name to give transformers as `attn_implementation`.
IMPLEMENTATION = "ragspec"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of new tokens of one sequence in the packed row.

    Attributes:
        slot: the sequence's cache slot.
        start: tokens of the sequence already in the cache.
        length: new tokens.
    """

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Tokens of the sequence in the cache after this step."""
        return self.start + self.length


#: Segments up to this length are padded into one batched product, as wide as the longest; longer ones run alone. A verify step
#: is 1 + max_draft long at most, 11 at the default, and a prompt's tail beyond that should not widen the whole batch.
BATCHED_LENGTH = 12


class Plan(Protocol):
    """Where each token of a pass lies and what it may see; read by every layer.

    Attributes:
        cache: where the sequences live.
        tokens: of the pass, int64 [n].
        positions: of each in its sequence, int64 [n].
        slots: cache slot that each is written into, int64 [n].
        places: place in that slot, int64 [n].
        rows: tokens whose logits are wanted, int64 [r].
    """

    cache: SlotCache
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    places: Tensor
    rows: Tensor

    def attend(self, layer: int, queries: Tensor, rule: Rule) -> Tensor:
        """Attention of all queries [heads, n, head_dim] to what the layer's cache holds by now: [n, heads, value_dim]."""
        ...


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
        self.device = device
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
            rows = slice(self.offsets[i], self.offsets[i + 1])
            out[rows] = _attend_chunk(self, self.segments[i], layer, queries[:, rows], rule)
        if self.batch is not None:
            batch, padded = self.batch, self.batch.padded
            keys, values = self.cache.read(layer, padded.first_slot, padded.last_slot, padded.context)
            attended = attend_padded(queries[:, batch.gather], keys, values, batch.bias(rule.window), rule)
            out[batch.packed] = attended[batch.scatter]
        return out


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
    for i, segment in zip(members, segments, strict=True):
        first = (segment.slot - first_slot) * width
        here = slice(first, first + segment.length)
        gather[here] = range(plan.offsets[i], plan.offsets[i + 1])
        ends[here] = range(segment.start, segment.end)
        packed += range(plan.offsets[i], plan.offsets[i + 1])
        scatter += range(first, first + segment.length)
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


_PLAN: ContextVar[Plan] = ContextVar("ragspec_step_plan")


@contextmanager
def attending(plan: Plan) -> Iterator[None]:
    """Let the model's attention layers see `plan` for the length of one forward pass."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a layer asks of attention beyond causality."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = field(repr=False)


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Store the step's keys and values, then attend each sequence to its own slot (transformers' `AttentionInterface`).

    Args:
        module: the attention layer; its `layer_idx` names the cache's layer.
        query: [1, heads, n, head_dim].
        key: [1, kv_heads, n, head_dim].
        value: [1, kv_heads, n, value_dim].
        attention_mask: unused, the plan knows what is visible.
        scaling: of the scores; 1/sqrt(head_dim) where None.
        sliding_window: tokens a query sees, itself included, or None for all.
        softcap: Gemma's tanh bound on scores.
        s_aux: attention sinks, one logit a head.

    Returns:
        [1, n, heads, value_dim] and no weights.
    """
    del attention_mask
    plan = _PLAN.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    plan.cache.write(layer, plan.slots, plan.places, key, value)
    rule = Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    return plan.attend(layer, query[0], rule)[None], None


def attend_padded(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, rule: Rule) -> Tensor:
    """Segments of one width over a range of slots, together.

    Args:
        queries: [heads, rows * width, d].
        keys: [rows * kv_heads, context, d].
        values: [rows * kv_heads, context, v].
        bias: [rows, 1, 1, width, context].
        rule: what the layer asks for.

    Returns:
        [rows * width, heads, v].
    """
    rows, width, dim = bias.shape[0], bias.shape[3], queries.shape[-1]
    kv_heads = keys.shape[0] // rows
    group = queries.shape[0] // kv_heads
    folded = queries.view(kv_heads, group, rows, width, dim)
    folded = folded.permute(2, 0, 1, 3, 4).reshape(rows * kv_heads, group * width, dim)
    mixed = _mix(folded, keys, values, bias, rule)
    mixed = mixed.view(rows, kv_heads, group, width, -1).permute(0, 3, 1, 2, 4)
    return mixed.reshape(rows * width, kv_heads * group, -1)


def _attend_chunk(plan: StepPlan, segment: Segment, layer: int, queries: Tensor, rule: Rule) -> Tensor:
    """One long segment, a prompt chunk: `[n, heads, value_dim]`."""
    keys, values = plan.cache.read(layer, segment.slot, segment.slot + 1, segment.end)
    kv_heads, dim = keys.shape[0], queries.shape[-1]
    group = queries.shape[0] // kv_heads
    windowed = rule.window is not None and segment.end > rule.window
    if not windowed and rule.softcap is None and rule.sinks is None:
        return _chunk_by_sdpa(segment, queries, keys, values, rule.scaling)
    ends = torch.arange(segment.start, segment.end, device=plan.device)[None]
    bias = visibility(ends, segment.end, rule.window, plan.dtype)
    folded = queries.reshape(kv_heads, group * segment.length, dim)
    mixed = _mix(folded, keys, values, bias, rule)
    return mixed.view(kv_heads * group, segment.length, -1).transpose(0, 1)


def _chunk_by_sdpa(segment: Segment, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """A chunk through torch's fused kernel, which never builds the score matrix."""
    mask = None
    if segment.start:
        ends = torch.arange(segment.start, segment.end, device=queries.device)[:, None]
        mask = torch.arange(segment.end, device=queries.device) <= ends
    mixed = functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def visibility(ends: Tensor, context: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query at `ends` [rows, width] may look and -inf elsewhere, [rows, 1, 1, width, context]."""
    places = torch.arange(context, device=ends.device)
    ends = ends[:, :, None]
    visible = places <= ends
    if window is not None:
        visible &= places > ends - window
    bias = torch.zeros(visible.shape, dtype=dtype, device=ends.device).masked_fill_(~visible, float("-inf"))
    return bias[:, None, None]


def _mix(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, rule: Rule) -> Tensor:
    """Softmax of the biased scores over the values.

    Args:
        queries: [rows * kv_heads, group * width, d].
        keys: [rows * kv_heads, context, d].
        values: [rows * kv_heads, context, v].
        bias: [rows, 1, 1, width, context].
        rule: what the layer asks for.

    Returns:
        [rows * kv_heads, group * width, v].
    """
    rows, _, _, width, context = bias.shape
    nothing = queries.new_zeros((1, 1, 1))
    scores = torch.baddbmm(nothing, queries, keys.transpose(1, 2), beta=0, alpha=rule.scaling)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    by_head = scores.view(rows, keys.shape[0] // rows, -1, width, context).add_(bias)
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).view(1, by_head.shape[1], by_head.shape[2], 1, 1)
        with_sink = torch.cat((by_head, sinks.expand(rows, -1, -1, width, 1)), dim=-1)
        weights = torch.softmax(with_sink, dim=-1, dtype=torch.float32)[..., :-1]
    else:
        weights = torch.softmax(by_head, dim=-1, dtype=torch.float32)
    return torch.bmm(weights.to(values.dtype).reshape(scores.shape), values)


# No mask is registered for it: transformers then asks for none, and does not look whether the positions are packed ones, which
# would make the host wait for the device once a pass.
AttentionInterface.register(IMPLEMENTATION, ragged_attention)
