"""Attention of a packed, ragged step over the slot cache, registered with transformers as `ragspec`.

A step packs the new tokens of all sequences into one row, so that every matrix product of the model runs once over all of
them: prompt chunks and verify steps share it. Only attention has to tell sequences apart, and it does so here. The query heads
that share a key head are folded into the query length, `[kv_heads, group * n, d] @ [kv_heads, d, T]`: repeating keys and
values instead, as stock attention does, costs four to nine times as much on CPU (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
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
        attention_mask: unused, the plan knows what is visible; contexts end before a mask would say more (`masked_windows.py`).
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


def attend_chunk(queries: Tensor, keys: Tensor, values: Tensor, rule: Rule, dtype: torch.dtype) -> Tensor:
    """One long segment, a prompt chunk: the last n tokens of a slot.

    Args:
        queries: [heads, n, d].
        keys: [kv_heads, end, d].
        values: [kv_heads, end, v].
        rule: what the layer asks for.
        dtype: of the attention bias.

    Returns:
        [n, heads, v].
    """
    kv_heads, end, dim = keys.shape
    heads, length, _ = queries.shape
    windowed = rule.window is not None and end > rule.window
    if not windowed and rule.softcap is None and rule.sinks is None:
        return _chunk_by_sdpa(queries, keys, values, rule.scaling)
    bias = visibility(torch.arange(end - length, end, device=queries.device)[None], end, rule.window, dtype)
    folded = queries.reshape(kv_heads, heads // kv_heads * length, dim)
    mixed = _mix(folded, keys, values, bias, rule)
    return mixed.view(heads, length, -1).transpose(0, 1)


def _chunk_by_sdpa(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """A chunk through torch's fused kernel, which never builds the score matrix."""
    end = keys.shape[1]
    start = end - queries.shape[1]
    mask = None
    if start:
        ends = torch.arange(start, end, device=queries.device)[:, None]
        mask = torch.arange(end, device=queries.device) <= ends
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
