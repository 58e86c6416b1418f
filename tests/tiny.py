"""Tiny seeded models and a tokenizer of single characters: real transformers parts, small enough for thousands of cases."""

from __future__ import annotations

from dataclasses import fields
from functools import cache, cached_property, lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from ragspec.decoding.attention import Plan, attending, ragged_attention
from ragspec.decoding.native.target import NativeTarget, make_native_target
from ragspec.decoding.request import Request
from ragspec.decoding.transformers_target import TransformersTarget, make_target

END = 256
VOCABULARY = 258
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": 257,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
    "gpt_oss": GptOssConfig,
}
_EXTRA: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1},
}
#: What the int8 kernels take: widths that are not powers of two, a group of three queries a key.
INT8_SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: the newline, printable ASCII and Latin letters from U+0100 on, and an end token; no merges."""
    return _spell([chr(c) for c in (10, *range(32, 127), *range(0x100, 0x1A0))])


def _spell(alphabet: list[str]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<end>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>")


@lru_cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, spelt `<0x41>`, as SentencePiece models fall back to."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def config(family: str, **shape: object) -> PreTrainedConfig:
    """A family's tiny configuration, changed where `shape` says so."""
    return shaped(FAMILIES[family], **{**_EXTRA.get(family, {}), **shape})


def shaped(kind: type[PreTrainedConfig], **shape: object) -> PreTrainedConfig:
    """A tiny configuration of any kind of decoder, changed where `shape` says so."""
    return kind(**{**_SHAPE, **shape})


@lru_cache
def target(family: str = "llama") -> TransformersTarget:
    """A seeded model of a family in float32."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config(family), dtype=torch.float32)
    model.generation_config.eos_token_id = END
    return make_target(model, tokenizer(), f"tiny-{family}@seed7")


@lru_cache
def smallest() -> TransformersTarget:
    """A Llama that is run a hundred thousand times: 38 letters, an end and a pad token.

    It has two layers because in one alone a token's keys do not depend on the tokens before it, and a cache that confused
    prefixes would go unnoticed.
    """
    torch.manual_seed(5)
    shape = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
        "eos_token_id": 38,
        "pad_token_id": 39,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**_SHAPE, **shape}), dtype=torch.float32)
    model.generation_config.eos_token_id = 38
    made = make_target(model, _spell([chr(c) for c in range(97, 97 + 38)]), "smallest-llama@seed5")
    return _BareTarget(**{field.name: getattr(made, field.name) for field in fields(made)})


class _BareTarget(TransformersTarget):
    """A Llama's forward pass without the calls that transformers puts around so little arithmetic: half the time.

    Attention and cache are the real ones. Gains of norms are folded into the matrices behind them.
    """

    @cached_property
    def _matrices(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of each layer: queries, keys and values; output; gate and up; down."""
        matrices = []
        for layer in self.model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            gains = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            matrices.append((qkv * gains[0], attention.o_proj.weight, gate_up * gains[1], mlp.down_proj.weight))
        return matrices

    @cached_property
    def _turns(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position."""
        cosine, sine = self.model.model.rotary_emb(torch.zeros(1), torch.arange(self.context_window)[None])
        return cosine[0], sine[0]

    def _logits(self, plan: Plan) -> Tensor:
        config, body = self.model.config, self.model.model
        queries, keys = config.num_attention_heads, config.num_key_value_heads
        cosine, sine = (turn[plan.positions] for turn in self._turns)
        states = body.embed_tokens.weight[plan.tokens]
        with attending(plan):
            for layer, (qkv, out, gate_up, down) in zip(body.layers, self._matrices, strict=True):
                for listen in layer._forward_pre_hooks.values():
                    listen(layer, (states[None],))
                heads = (self._normalized(states) @ qkv.T).view(len(plan.tokens), -1, config.head_dim).transpose(0, 1)
                turning, values = heads[: queries + keys], heads[queries + keys :]
                low, high = turning.chunk(2, -1)
                turned = turning * cosine + torch.cat((-high, low), -1) * sine
                attention = layer.self_attn
                mixed, _ = ragged_attention(
                    attention, turned[None, :queries], turned[None, queries:], values[None], None, attention.scaling
                )
                states = states + mixed.reshape(len(plan.tokens), -1) @ out.T
                gate, up = (self._normalized(states) @ gate_up.T).chunk(2, -1)
                states = states + functional.silu(gate) * up @ down.T
        for listen in body.layers[-1]._forward_hooks.values():
            listen(body.layers[-1], (), states[None])
        return self.model.lm_head(self._normalized(states[plan.rows])[None] * body.norm.weight)[0]

    def _normalized(self, states: Tensor) -> Tensor:
        return states * (states.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()


def int8(kernels: Path) -> NativeTarget:
    """A seeded Llama in 8 bits, its kernels compiled into a folder."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config("llama", **INT8_SHAPE), dtype=torch.float32)
    model.generation_config.eos_token_id = END
    return make_native_target(model, tokenizer(), "tiny-llama@seed3+int8", kernels)


@cache
def generate(aim: TransformersTarget, request: Request) -> tuple[int, ...]:
    """What transformers' own greedy `generate` writes for a request, on transformers' own attention and cache."""
    model = aim.model
    model.set_attn_implementation("eager")
    try:
        prompt = torch.tensor([request.prompt])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.sampling.max_tokens,
                do_sample=False,
            )
    finally:
        model.set_attn_implementation("ragspec")
    return tuple(out[0, prompt.shape[1] :].tolist())
