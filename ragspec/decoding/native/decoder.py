"""A Llama-shaped decoder on the kernels: packed once from a transformers model, then one C call a step."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, addressof, byref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragspec.decoding.native import abi
from ragspec.decoding.native.cache import PackedCache
from ragspec.decoding.native.weights import QuantizedLinear, mixable
from ragspec.decoding.target import StepOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ragspec.decoding.attention import Segment

_LANES = 16
#: Architectures whose layer is the one that forward.cpp computes.
_ARCHITECTURES = {"llama", "mistral", "qwen2", "qwen3"}


def misfit(model: PreTrainedModel) -> str | None:
    """Why the kernels cannot run a model; None where they can."""
    config = model.config
    if config.model_type not in _ARCHITECTURES:
        return f"its architecture is {config.model_type}, not one of {', '.join(sorted(_ARCHITECTURES))}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    body: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    layers = body.layers
    dim = layers[0].self_attn.head_dim
    widths = [config.hidden_size, config.intermediate_size, dim * config.num_attention_heads]
    if dim % _LANES or dim > abi.MOST_HEAD_DIM or not all(mixable(width) for width in widths):
        return f"its widths {widths} or its head dimension {dim} do not fit the kernels"
    turned = body.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))[0].shape[-1]
    if turned != dim:
        return "it turns only a part of each head by position"
    for layer in layers:
        if any(part.bias is not None for part in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)):
            return "it has biases beyond those of queries, keys and values"
    return None


class Decoder:
    """The kernels' own copy of a model.

    Args:
        kernels: the compiled library.
        model: a transformers model that `misfit` finds no fault with; not needed afterwards.
        positions: how many tokens a sequence may have.

    Attributes:
        kernels: the library.
        embedding: [vocabulary, hidden] in bfloat16.
        output: the output matrix.
    """

    def __init__(self, kernels: CDLL, model: PreTrainedModel, positions: int) -> None:
        self.kernels = kernels
        config: Any = model.config
        body: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self.hidden = int(config.hidden_size)
        self.heads = int(config.num_attention_heads)
        self.key_heads = int(config.num_key_value_heads)
        self.head_dim = int(body.layers[0].self_attn.head_dim)
        self.intermediate = int(config.intermediate_size)
        self.vocabulary = int(config.vocab_size)
        self._windowed = config.model_type == "mistral"
        self._kept: list[Any] = []  # what the structures point to
        self.embedding = body.embed_tokens.weight.detach().to(torch.bfloat16).contiguous().clone()
        self._layers = (abi.Layer * len(body.layers))(*[self._layer(layer) for layer in body.layers])
        output: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.output = QuantizedLinear.of(kernels, output.weight.detach())
        self._logit_width = self.output.outputs
        cosine, sine = _angles(body.rotary_emb, positions, self.head_dim)
        self._model = abi.Model(
            self._layers,
            self.embedding.data_ptr(),
            self._keep(body.norm.weight),
            self._keep(cosine),
            self._keep(sine),
            self.output.struct,
            len(body.layers),
            self.hidden,
            self.heads,
            self.key_heads,
            self.head_dim,
            self.intermediate,
            self.vocabulary,
            float(config.rms_norm_eps),
            float(body.layers[0].self_attn.scaling),
        )
        self._positions = positions
        self._scratch: dict[str, Tensor] = {}
        #: Float64 [len(abi.PHASES)] to which each step adds its seconds by kind of work; None: nobody wants to know.
        self.phases: Tensor | None = None

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self._layers)

    @property
    def token_bytes(self) -> int:
        """Memory of one token's keys and values, in bfloat16."""
        return len(self._layers) * self.key_heads * self.head_dim * 2 * 2

    def make_cache(self, slots: int, capacity: int) -> PackedCache:
        """A cache for this decoder."""
        return PackedCache(
            layers=len(self._layers),
            slots=slots,
            key_heads=self.key_heads,
            capacity=capacity,
            head_dim=self.head_dim,
        )

    def forward(
        self,
        cache: PackedCache,
        segments: Sequence[Segment],
        tokens: Sequence[int],
        wanted: Sequence[int],
        features: Sequence[int] = (),
    ) -> StepOutput:
        """One forward pass over a packed step.

        Args:
            cache: where the sequences live.
            segments: whose the tokens are, in packed order.
            tokens: [n].
            wanted: packed places whose next-token logits are wanted, [r].
            features: layers whose input is wanted of every token; see `Target.forward`.

        Returns:
            All in float32.
        """
        n, r = len(tokens), len(wanted)
        if max(segment.end for segment in segments) > min(self._positions, cache.capacity):
            msg = f"a segment ends behind {min(self._positions, cache.capacity)} tokens: {segments}"
            raise ValueError(msg)
        logits = torch.empty((r, self._logit_width))
        states = torch.empty((r, self.hidden))
        choices = torch.empty(r, dtype=torch.int32)
        normalizers = torch.empty(r)
        runs, tiles, slots, positions = self._plan(segments)
        widest = max(self.hidden, self.heads * self.head_dim, self.intermediate)
        qkv = (self.heads + 2 * self.key_heads) * self.head_dim
        wide = max(qkv, 2 * self.intermediate)
        ids, places = integers(tokens), integers(wanted)
        listening = integers(features)
        between = torch.empty((n, len(features), self.hidden)) if features else None
        step = abi.Step(
            addressof(runs),
            addressof(tiles),
            ids.data_ptr(),
            slots.data_ptr(),
            positions.data_ptr(),
            places.data_ptr(),
            n,
            len(tiles),
            r,
            cache.slots,
            cache.capacity,
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            self._room("hidden", n * self.hidden, torch.float32),
            states.data_ptr(),
            listening.data_ptr(),
            None if between is None else between.data_ptr(),
            logits.data_ptr(),
            choices.data_ptr(),
            normalizers.data_ptr(),
            self._room("bytes", max(n, r) * widest, torch.uint8),
            self._room("scales", max(n, r), torch.float32),
            self._room("wide", max(n, r) * wide, torch.float32),
            self._room("queries", n * self.heads * self.head_dim, torch.bfloat16),
            self._room("mixed", n * self.heads * self.head_dim, torch.float32),
            None if self.phases is None else self.phases.data_ptr(),
            len(features),
            torch.get_num_threads(),
        )
        self.kernels.ragspec_forward(byref(self._model), byref(step))
        return StepOutput(logits[:, : self.vocabulary], choices, normalizers, states, between)

    def _plan(self, segments: Sequence[Segment]) -> tuple[Any, Any, Tensor, Tensor]:
        group = self.heads // self.key_heads
        runs = (abi.Segment * len(segments))()
        tiles = []
        offset = 0
        for i, segment in enumerate(segments):
            runs[i] = abi.Segment(segment.slot, segment.start, segment.length, offset)
            offset += segment.length
            rows = segment.length * group
            count = -(-rows // abi.TILE_ROWS)
            edges = [rows * j // count for j in range(count + 1)]
            tiles += [abi.Tile(i, first, last - first) for first, last in pairwise(edges)]
        slots = [segment.slot for segment in segments for _ in range(segment.length)]
        positions = [place for segment in segments for place in range(segment.start, segment.end)]
        return runs, (abi.Tile * len(tiles))(*tiles), integers(slots), integers(positions)

    def _room(self, name: str, size: int, dtype: torch.dtype) -> int:
        held = self._scratch.get(name)
        if held is None or len(held) < size:
            self._scratch[name] = held = torch.empty(size, dtype=dtype)
        return held.data_ptr()

    def _layer(self, layer: Any) -> abi.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        # Mistral's layers read it out of the configuration; Qwen's hold it, or None where a layer sees everything.
        window = getattr(attention, "sliding_window", attention.config.sliding_window if self._windowed else None)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return abi.Layer(
            self._linear(*parts),
            self._linear(attention.o_proj),
            self._linear(mlp.gate_proj, mlp.up_proj),
            self._linear(mlp.down_proj),
            self._keep(layer.input_layernorm.weight),
            self._keep(layer.post_attention_layernorm.weight),
            *(None if norm is None else self._keep(norm.weight) for norm in norms),
            int(window or 0),
        )

    def _linear(self, *parts: nn.Linear) -> abi.Linear:
        weight = torch.cat([part.weight.detach() for part in parts])
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        made = QuantizedLinear.of(self.kernels, weight, torch.cat(biases) if biases else None)
        self._kept.append(made)
        return made.struct

    def _keep(self, values: Tensor) -> int:
        kept = values.detach().float().contiguous().clone()
        self._kept.append(kept)
        return kept.data_ptr()


def integers(values: Sequence[int]) -> Tensor:
    """A tensor for the kernels, made without torch's threads: those would go on spinning beside the kernels' for a while."""
    return torch.tensor(values, dtype=torch.int32)


def _angles(rotary: nn.Module, positions: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [positions, head_dim / 2], as the model's own module gives them."""
    with torch.inference_mode():
        cosine, sine = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None])
    return cosine[0, :, : dim // 2].float(), sine[0, :, : dim // 2].float()
