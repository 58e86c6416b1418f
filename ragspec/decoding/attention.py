"""Attention of a packed, ragged step over the slot cache, registered with transformers as `ragspec`.

A step packs the new tokens of all sequences into one row, so that every matrix product of the model runs once over all of
them: prompt chunks and verify steps share it. Only attention has to tell sequences apart, and it does so here. The query heads
that share a key head are folded into the query length, `[kv_heads, group * n, d] @ [kv_heads, d, T]`: repeating keys and
values instead, as stock attention does, costs four to nine times as much on CPU (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

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


class StepPlan:
    """Where each token of a step lies and what it may see; built once a step, read by every layer.

    Args:
        cache: where the sequences live.
        segments: the step's segments in packed order.
        device: of the model.
        dtype: of the attention bias, the model's own.
    """

    def __init__(
        self, cache: SlotCache, segments: Sequence[Segment], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.cache = cache
        self.segments = tuple(segments)
        self.dtype = dtype
        self.device = device
        positions = [torch.arange(s.start, s.end) for s in segments]
        self.positions = torch.cat(positions).to(device)
        self.slots = torch.repeat_interleave(
            torch.tensor([s.slot for s in segments]), torch.tensor([s.length for s in segments])
        ).to(device)
        offsets = [0]
        for segment in segments:
            offsets.append(offsets[-1] + segment.length)
        self.offsets = offsets
        short = [i for i, s in enumerate(segments) if s.length <= BATCHED_LENGTH]
        self.alone = [i for i, s in enumerate(segments) if s.length > BATCHED_LENGTH]
        self.batch = _Batch(self, short) if short else None


class _Batch:
    """The short segments of a step, padded to one width over a contiguous range of slots."""

    def __init__(self, plan: StepPlan, members: list[int]) -> None:
        segments = [plan.segments[i] for i in members]
        self.first_slot = min(s.slot for s in segments)
        self.last_slot = max(s.slot for s in segments) + 1
        self.width = max(s.length for s in segments)
        self.context = max(s.end for s in segments)
        rows = self.last_slot - self.first_slot
        # Padding and idle slots read the packed row's token 0 and look at position 0: finite, and thrown away.
        gather = torch.zeros((rows, self.width), dtype=torch.long)
        ends = torch.zeros((rows, self.width), dtype=torch.long)
        scatter = []
        for i, segment in zip(members, segments, strict=True):
            row = segment.slot - self.first_slot
            offset = plan.offsets[i]
            gather[row, : segment.length] = torch.arange(offset, offset + segment.length)
            ends[row, : segment.length] = torch.arange(segment.start, segment.end)
            scatter.append(row * self.width + torch.arange(segment.length))
        self.gather = gather.flatten().to(plan.device)
        self.packed = torch.cat([torch.arange(plan.offsets[i], plan.offsets[i + 1]) for i in members]).to(plan.device)
        self.scatter = torch.cat(scatter).to(plan.device)
        self.rows = rows
        self._ends = ends.to(plan.device)[:, :, None]
        self._dtype = plan.dtype
        self._bias: dict[int | None, Tensor] = {}

    def bias(self, window: int | None) -> Tensor:
        """0 where a query may look and -inf elsewhere, `[rows, 1, 1, width, context]`; the same for every head."""
        if window not in self._bias:
            self._bias[window] = _bias(self._ends, self.context, window, self._dtype)[:, None, None]
        return self._bias[window]


_PLAN: ContextVar[StepPlan] = ContextVar("ragspec_step_plan")


@contextmanager
def attending(plan: StepPlan) -> Iterator[None]:
    """Let the model's attention layers see `plan` for the length of one forward pass."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


@dataclass(frozen=True, slots=True)
class _Rule:
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
    plan.cache.write(layer, plan.slots, plan.positions, key, value)
    rule = _Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    queries = query[0]
    out = queries.new_empty((queries.shape[1], queries.shape[0], value.shape[-1]))
    for i in plan.alone:
        rows = slice(plan.offsets[i], plan.offsets[i + 1])
        out[rows] = _attend_chunk(plan, plan.segments[i], layer, queries[:, rows], rule)
    if plan.batch is not None:
        attended = _attend_batch(plan, plan.batch, layer, queries, rule)
        out[plan.batch.packed] = attended[plan.batch.scatter]
    return out[None], None


def _attend_batch(plan: StepPlan, batch: _Batch, layer: int, queries: Tensor, rule: _Rule) -> Tensor:
    """Short segments together: `[rows * width, heads, value_dim]`."""
    keys, values = plan.cache.read(layer, batch.first_slot, batch.last_slot, batch.context)
    kv_heads, dim = keys.shape[0] // batch.rows, queries.shape[-1]
    group = queries.shape[0] // kv_heads
    folded = queries[:, batch.gather].view(kv_heads, group, batch.rows, batch.width, dim)
    folded = folded.permute(2, 0, 1, 3, 4).reshape(batch.rows * kv_heads, group * batch.width, dim)
    mixed = _mix(folded, keys, values, batch.bias(rule.window), rule)
    mixed = mixed.view(batch.rows, kv_heads, group, batch.width, -1).permute(0, 3, 1, 2, 4)
    return mixed.reshape(batch.rows * batch.width, kv_heads * group, -1)


def _attend_chunk(plan: StepPlan, segment: Segment, layer: int, queries: Tensor, rule: _Rule) -> Tensor:
    """One long segment, a prompt chunk: `[n, heads, value_dim]`."""
    keys, values = plan.cache.read(layer, segment.slot, segment.slot + 1, segment.end)
    kv_heads, dim = keys.shape[0], queries.shape[-1]
    group = queries.shape[0] // kv_heads
    windowed = rule.window is not None and segment.end > rule.window
    if not windowed and rule.softcap is None and rule.sinks is None:
        return _chunk_by_sdpa(segment, queries, keys, values, rule.scaling)
    ends = torch.arange(segment.start, segment.end, device=plan.device)[None, :, None]
    bias = _bias(ends, segment.end, rule.window, plan.dtype)[:, None, None]
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


def _bias(ends: Tensor, context: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query at `ends` [rows, width, 1] may look and -inf elsewhere, [rows, width, context]."""
    places = torch.arange(context, device=ends.device)
    visible = places <= ends
    if window is not None:
        visible &= places > ends - window
    return torch.zeros(visible.shape, dtype=dtype, device=ends.device).masked_fill_(~visible, float("-inf"))


def _mix(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, rule: _Rule) -> Tensor:
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


def _no_mask(*_: Any, **__: Any) -> None:
    """Transformers asks for a mask once a forward pass; the plan makes it needless."""


AttentionInterface.register(IMPLEMENTATION, ragged_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
