"""EAGLE-3 heads in the published layout, of random weights, and what they draft, computed plainly."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragspec.decoding.transformers_target import TransformersTarget

HEADS, KEY_HEADS, DIM, INNER = 6, 2, 8, 40


def configuration(target: TransformersTarget, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "vocab_size": target.vocabulary,
        "draft_vocab_size": target.vocabulary // 2,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    return {name: value for name, value in (config | changes).items() if value is not None}


def weights(config: dict[str, Any], *, features: int = 3) -> dict[str, Tensor]:
    """Seeded, and large enough that drafts differ from text to text; draft tokens are every second one."""
    generator = torch.Generator().manual_seed(13)
    width, drafts, vocabulary = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    hidden = config.get("target_hidden_size", width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (1.5 * shape[-1] ** -0.5)

    def gain() -> Tensor:
        return 1 + 0.3 * torch.randn(width, generator=generator)

    tokens = torch.arange(drafts) * 2
    chosen = torch.zeros(vocabulary, dtype=torch.bool)
    chosen[tokens] = True
    return {
        "fc.weight": draw(width, features * hidden),
        "midlayer.input_layernorm.weight": gain(),
        "midlayer.hidden_norm.weight": gain(),
        "midlayer.post_attention_layernorm.weight": gain(),
        "midlayer.self_attn.q_proj.weight": draw(HEADS * DIM, 2 * width),
        "midlayer.self_attn.k_proj.weight": draw(KEY_HEADS * DIM, 2 * width),
        "midlayer.self_attn.v_proj.weight": draw(KEY_HEADS * DIM, 2 * width),
        "midlayer.self_attn.o_proj.weight": draw(width, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": draw(INNER, width),
        "midlayer.mlp.up_proj.weight": draw(INNER, width),
        "midlayer.mlp.down_proj.weight": draw(width, INNER),
        "norm.weight": gain(),
        "lm_head.weight": 3 * draw(drafts, width),
        "d2t": tokens - torch.arange(drafts),
        "t2d": chosen,
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


class Reference:
    """A published head as the paper has it: every position computed anew for every token, in double precision.

    Args:
        folder: config and weights.
        target: whose hidden states it reads, by transformers' own forward pass.
        layers: whose inputs are the features.
    """

    def __init__(self, folder: Path, target: TransformersTarget, layers: Sequence[int]) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._weights = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
        self._model = target.model
        self._layers = layers
        embeddings = target.model.get_input_embeddings().weight.detach()
        self._embeddings = self._weights.get("embed_tokens.weight", embeddings).double()
        offsets = self._weights.get("d2t", torch.zeros(len(self._output(()))))
        self._tokens = (torch.arange(len(offsets)) + offsets.long()).tolist()

    def draft(
        self,
        text: Sequence[int],
        steps: int,
        own: Sequence[int] = (),
        behind: dict[int, int] | None = None,
        instead: Sequence[int] = (),
    ) -> tuple[list[int], list[float]]:
        """The likeliest tokens behind a text whose last token the target has not computed, and their probabilities.

        Args:
            text: prompt and answer so far.
            steps: tokens of the draft.
            own: tokens that may be drafted besides, where output rows are borrowed.
            behind: positions that have been computed with another token behind them than the text's.
            instead: tokens to go on with in place of those drafted.
        """
        states = list(self._features(text[:-1]) @ self._weights["fc.weight"].T)
        following = [(behind or {}).get(position, token) for position, token in enumerate(text[1:])]
        borrowed = "lm_head.weight" not in self._weights
        tokens = self._tokens + (sorted(set(own) - set(self._tokens)) if borrowed else [])
        rows = self._output(tokens)
        drafted, sure = [], []
        for _ in range(steps):
            states.append(self._layer(states, following))
            scores = rows @ self._norm("norm", states[-1])
            best = int(scores.argmax())
            drafted.append(tokens[best])
            sure.append(float(scores.softmax(-1)[best]))
            following.append(instead[len(drafted) - 1] if instead else drafted[-1])
        return drafted, sure

    def _output(self, tokens: Sequence[int]) -> Tensor:
        if "lm_head.weight" in self._weights:
            return self._weights["lm_head.weight"]
        rows = self._model.get_output_embeddings().weight.detach().double()
        return rows[list(tokens)] if tokens else rows

    def _features(self, text: Sequence[int]) -> Tensor:
        self._model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                states = self._model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        finally:
            self._model.set_attn_implementation("ragspec")
        return torch.cat([states[layer][0] for layer in self._layers], -1).double().clone()

    def _layer(self, states: Sequence[Tensor], following: Sequence[int]) -> Tensor:
        """What the layer makes of the last position."""
        state = torch.stack(list(states))
        embedded = self._embeddings[list(following)]
        seen = torch.cat(
            [self._norm("midlayer.input_layernorm", embedded), self._norm("midlayer.hidden_norm", state)], -1
        )
        query, key, value = (self._project(part, seen) for part in "qkv")
        mixed = []
        for head in range(HEADS):
            shared = head // (HEADS // KEY_HEADS)
            weights = (self._turned(key[:, shared]) @ self._turned(query[:, head])[-1] / math.sqrt(DIM)).softmax(-1)
            mixed.append(weights @ value[:, shared])
        after = state[-1] + self._weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        normed = self._norm("midlayer.post_attention_layernorm", after)
        gate, up = (self._weights[f"midlayer.mlp.{part}_proj.weight"] @ normed for part in ("gate", "up"))
        return after + self._weights["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def _project(self, part: str, seen: Tensor) -> Tensor:
        return (seen @ self._weights[f"midlayer.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, DIM))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).sqrt()
            * self._weights[f"{name}.weight"]
        )

    def _turned(self, x: Tensor) -> Tensor:
        """Each pair of numbers is a complex one, turned by its position."""
        frequencies = self._config["rope_theta"] ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        scaling = self._config.get("rope_scaling") or {}
        slower = frequencies / scaling.get("factor", 1.0)
        if (
            scaling.get("rope_type") == "llama3"
        ):  # Llama 3.1: long waves are stretched, short ones stay, between is a mixture
            turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            slower = kept * frequencies + (1 - kept) * slower
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * slower
        pairs = torch.complex(x[:, : DIM // 2].contiguous(), x[:, DIM // 2 :].contiguous())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)
