"""An attention head: one decoder layer over states from between the target's layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ragspec.decoding.attention import Plan, attending, ragged_attention
from ragspec.heads.architecture import Head, Norm, register
from ragspec.heads.shape import ATTENTION, AttentionShape, HeadShape


@register
class AttentionHead(Head):
    """One decoder layer that reads fused low, middle and high features (EAGLE-3, arXiv 2503.01840).

        state = fuse(features of the token at t)
        x = [norm(embedding of the token at t + 1), norm(state)]
        state' = state + out(attention over the x of positions 0 to t)
        state' = state' + down(silu(gate(norm(state'))) * up(norm(state')))
        logits of the token at t + 2 = output rows . norm(state')

    Ahead of what the target has computed, state' stands in for the fused features of the token that was drafted. Keys and
    values of a position need its state and nothing of the positions before it, so a text is taken in without attending.
    """

    architecture = ATTENTION
    #: Its only layer, as `ragged_attention` wants to know it.
    layer_idx = 0

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        if shape.attention is None:
            msg = "its shape says nothing of attention"
            raise ValueError(msg)
        self.layer = layer = shape.attention
        width, inner, dim = layer.width, shape.inner, layer.head_dim
        self.fuse = nn.Linear(layer.layer_count * shape.hidden, width, bias=False)
        self.token_norm, self.state_norm, self.inner_norm, self.output_norm = (
            Norm(width, shape.epsilon) for _ in range(4)
        )
        self.qkv = nn.Linear(2 * width, (layer.heads + 2 * layer.key_heads) * dim, bias=False)
        self.out = nn.Linear(layer.heads * dim, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.embedding = nn.Embedding(layer.own_embeddings, width) if layer.own_embeddings else None
        self.output = nn.Linear(width, len(shape.draft_tokens), bias=False) if layer.own_output else None
        self._turns = _Turns(layer)

    @property
    def longest_draft(self) -> int:
        """More than it was trained for: every place is like the one before."""
        return 2 * self.shape.depth

    def keys_and_values(self, state: Tensor, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What positions leave in the cache.

        Args:
            state: [n, width].
            embedded: the embedding of the token behind each, [n, width].
            positions: [n].

        Returns:
            [1, key_heads, n, head_dim] each.
        """
        queries = self.layer.heads * self.layer.head_dim
        both = self._by_head(functional.linear(self._seen(state, embedded), self.qkv.weight[queries:]))
        keys, values = both.chunk(2, 1)
        return self._turns.turn(keys, positions), values

    def advance(self, state: Tensor, embedded: Tensor, plan: Plan) -> Tensor:
        """The state behind one more token of each sequence.

        Args:
            state: [n, width].
            embedded: the token's embedding, [n, width].
            plan: where they are; its cache gets their keys and values.

        Returns:
            [n, width].
        """
        queries, keys, values = self.project(state, embedded, plan.positions)
        with attending(plan):
            mixed, _ = ragged_attention(self, queries, keys, values, None)
        return self.settle(state, mixed[0].flatten(1))

    def project(self, state: Tensor, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What positions ask, and what they leave in the cache; see `keys_and_values`.

        Returns:
            Queries [1, heads, n, head_dim], keys and values [1, key_heads, n, head_dim] each.
        """
        turning, both = self.layer.heads, self.layer.heads + self.layer.key_heads
        parts = self._by_head(self.qkv(self._seen(state, embedded)))
        turned = self._turns.turn(parts[:, :both], positions)
        return turned[:, :turning], turned[:, turning:], parts[:, both:]

    def settle(self, state: Tensor, mixed: Tensor) -> Tensor:
        """The state after attention, [n, width], given what that mixed, [n, heads * head_dim]."""
        state = state + self.out(mixed)
        gate, up = self.gate_up(self.inner_norm(state)).chunk(2, -1)
        changed: Tensor = state + self.down(functional.silu(gate) * up)
        return changed

    def _seen(self, state: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat((self.token_norm(embedded), self.state_norm(state)), -1)

    def _by_head(self, x: Tensor) -> Tensor:
        """[n, heads * head_dim] as [1, heads, n, head_dim]."""
        return x.view(len(x), -1, self.layer.head_dim).transpose(0, 1)[None]


class _Turns:
    """Rotary positions (arXiv 2104.09864), by transformers' own frequencies."""

    def __init__(self, layer: AttentionShape) -> None:
        config = LlamaConfig(
            num_attention_heads=layer.heads,
            head_dim=layer.head_dim,
            hidden_size=layer.heads * layer.head_dim,
            rope_parameters=dict(layer.rope),
        )
        rotary = LlamaRotaryEmbedding(config)
        self._frequencies: Tensor = rotary.inv_freq.float()
        self._scale = float(rotary.attention_scaling)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn [1, heads, n, head_dim] by its positions, [n]."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None].float() * self._frequencies
        cosine, sine = angles.cos() * self._scale, angles.sin() * self._scale
        low, high = x.float().chunk(2, -1)
        return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1).to(x.dtype)
