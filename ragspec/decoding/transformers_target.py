"""Any causal language model of transformers as target: its attention runs over our cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragspec.decoding.attention import IMPLEMENTATION, Plan, Segment, attending
from ragspec.decoding.cache import LayerLayout, SlotCache
from ragspec.decoding.masked_windows import masked_window
from ragspec.decoding.recorded_steps import RecordedSteps, Step
from ragspec.decoding.recorder import Recorder
from ragspec.decoding.static_step import Computed, make_outputs, padded_context
from ragspec.decoding.step_plan import StepPlan
from ragspec.decoding.target import StepOutput
from ragspec.errors import ModelUnavailableError

log = logging.getLogger(__name__)

#: Largest divergence, KL in nats at any of the checked positions, between the model's own attention and ours on the same
#: tokens. Rounding gives some 1e-6 in float32 and 1e-2 in bfloat16; a wrong mask or position gives 0.1 to 10.
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}

#: Generation settings by which transformers' greedy `generate` changes logits (`_get_logits_processor` in its
#: generation/utils.py), and the value of each, beside None, that changes nothing.
_PROCESSORS: dict[str, object] = {
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "guidance_scale": 1,
}

#: Context of a model whose positions know no limit.
_NO_LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class TransformersTarget:
    """A loaded decoder and what the engine must know of it.

    Attributes:
        model: a transformers causal LM whose attention implementation is ours.
        tokenizer: its tokenizer, with the chat template.
        identity: `name@fingerprint+precision`, recorded with every answer.
        eos_ids: tokens that end an answer.
        context_window: most tokens of prompt and answer that its positions and its layers' windows allow.
        cache_layout: what each layer stores, seen at load.
        recorded: its decode steps as recordings; None computes every step kernel by kernel.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: str
    eos_ids: frozenset[int]
    context_window: int
    cache_layout: Mapping[int, LayerLayout] = field(default_factory=dict)
    recorded: RecordedSteps | None = None

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device

    @property
    def precision(self) -> str:
        """What it computes in, as RAGSPEC_PRECISION names it."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """Rows of the output matrix; a draft token must be below."""
        return int(self._output_layer().weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return int(self._output_layer().weight.shape[1])

    @property
    def layers(self) -> int:
        """Decoder layers that can be listened to."""
        return len(self._layers())

    def embedding_rows(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings; see `Target.embedding_rows`."""
        layer: Any = self.model.get_input_embeddings()
        rows: Tensor = layer.weight.detach()[list(tokens)]
        return rows

    def output_rows(self, tokens: Sequence[int]) -> Tensor:
        """Rows of the output matrix; see `Target.output_rows`."""
        return self._output_layer().weight.detach()[list(tokens)]

    def slot_bytes(self, capacity: int) -> int:
        """Memory of one cache slot of `capacity` tokens, and the place behind them."""
        return (capacity + 1) * sum(layer.token_bytes for layer in self.cache_layout.values())

    def context_read(self, reached: int) -> int:
        """Places of a slot that a decode step reads; see `Target.context_read`."""
        return reached if self.recorded is None or self.recorded.given_up else padded_context(reached)

    def make_cache(self, slots: int, capacity: int) -> SlotCache:
        """A cache that `forward` can use, its memory reserved.

        Args:
            slots: sequences held at once.
            capacity: tokens a slot holds.

        Raises:
            RuntimeError: the memory does not suffice, in the allocator's words.
        """
        cache = SlotCache(slots=slots, capacity=capacity)
        cache.reserve(self.cache_layout)
        if self.recorded is not None:
            self.recorded.attach(
                cache, lambda: make_outputs(slots, self.vocabulary, self.hidden_size, self.model.dtype, self.device)
            )
        return cache

    def forward(
        self,
        cache: SlotCache,
        segments: Sequence[Segment],
        tokens: list[int],
        rows: list[int],
        *,
        hidden: bool = False,
        features: Sequence[int] = (),
    ) -> StepOutput:
        """One forward pass over a packed step; see `Target.forward`."""

        def eagerly() -> StepOutput:
            plan = StepPlan(cache, segments, tokens, rows, device=self.device, dtype=self.model.dtype)
            given = self._compute(plan, features)
            logits = given.logits
            return StepOutput(
                logits,
                logits.argmax(-1),
                logits.float().logsumexp(-1),
                given.hidden if hidden else None,
                torch.stack([given.features[layer] for layer in features], 1) if features else None,
            )

        if self.recorded is None:
            return eagerly()
        return self.recorded.run(cache, Step(segments, tokens, rows, hidden, tuple(features)), self._compute, eagerly)

    def _compute(self, plan: Plan, features: Sequence[int]) -> Computed:
        """A forward pass over a plan, listening to the layers asked for."""
        captured: list[Tensor] = []
        heard: dict[int, Tensor] = {}
        hooks = [self._output_layer().register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0][0]))]
        try:
            hooks += [self._listen(layer, heard) for layer in features]
            logits = self._logits(plan)
        finally:
            for hook in hooks:
                hook.remove()
        return Computed(logits, captured[0], heard)

    def _listen(self, layer: int, heard: dict[int, Tensor]) -> RemovableHandle:
        """Hear what enters a layer, or what leaves the last, [n, hidden]."""

        def enters(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            heard[layer] = inputs[0][0]

        def leaves(_module: nn.Module, _inputs: Any, output: Any) -> None:
            heard[layer] = (output if isinstance(output, Tensor) else output[0])[0]

        layers = self._layers()
        if layer < len(layers):
            return layers[layer].register_forward_pre_hook(enters)
        return layers[-1].register_forward_hook(leaves)

    def _layers(self) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = getattr(self.model.get_decoder(), "layers", ())  # type: ignore[no-untyped-call]
        return layers

    def _logits(self, plan: Plan) -> Tensor:
        with attending(plan):
            out = self.model(
                input_ids=plan.tokens[None],
                position_ids=plan.positions[None],
                use_cache=False,
                logits_to_keep=plan.rows,
            )
        logits: Tensor = out.logits[0]
        return logits

    def _output_layer(self) -> nn.Linear:
        layer: nn.Linear = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return layer


def make_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, identity: str, recorder: Recorder | None = None
) -> TransformersTarget:
    """Wrap a model that is already in memory.

    Args:
        model: a causal LM.
        tokenizer: its tokenizer.
        identity: see `TransformersTarget`.
        recorder: of its decode steps; without one they run kernel by kernel.

    Raises:
        ModelUnavailableError: code `unsupported_architecture`.
    """
    model.train(mode=False)
    model.set_attn_implementation(IMPLEMENTATION)
    warn_of_processors(model)
    target = TransformersTarget(model, tokenizer, identity, end_tokens(model, tokenizer), context_window(model))
    recorded = None if recorder is None else RecordedSteps(recorder, CHECK_TOLERANCE[model.dtype])
    return replace(_check_attention(target), recorded=recorded)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What `generate` would stop at: the generation config's end tokens, else the model's, else the tokenizer's."""
    for holder in (model.generation_config, model.config, tokenizer):
        found: Any = getattr(holder, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


def context_window(model: PreTrainedModel) -> int:
    """The most tokens whose positions the model knows, and rotates by the same angles whoever else is in the pass.

    transformers sets the angles of some scaled rotary embeddings by the longest position of a whole pass, so one long
    sequence would change its neighbours' answers (`dynamic_rope_update` in its modeling_rope_utils.py). Type `dynamic`
    does so beyond `max_position_embeddings`, which is the limit anyway; `longrope` (Phi-3) beyond its original limit.
    """
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", None) or _NO_LIMIT)
    rope = getattr(config, "rope_parameters", None) or {}
    # A set for all layers, or one for each type of layer.
    sets = [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
    steady = [int(one["original_max_position_embeddings"]) for one in sets if one.get("rope_type") == "longrope"]
    window = min([limit, *steady])
    if window < limit:
        log.warning(
            "the context window is %d of the model's %d tokens: beyond, its longrope positions turn by the longest "
            "sequence in a batch",
            window,
            limit,
        )
    return window


def warn_of_processors(model: PreTrainedModel) -> None:
    """Say which of the model's generation settings make its greedy `generate` write something else than its argmax."""
    config = model.generation_config
    found = {name: getattr(config, name, None) for name in _PROCESSORS}
    changing = [f"{name}={value}" for name, value in found.items() if value not in (None, _PROCESSORS[name])]
    if changing:
        log.warning(
            "the model's generation config sets %s: `generate` obeys, ragspec writes the plain argmax",
            ", ".join(changing),
        )


def _within_windows(target: TransformersTarget) -> TransformersTarget:
    """The target with a context no longer than the least window that our attention is not told."""
    model = target.model
    window = masked_window(model)
    if window is None or window >= target.context_window:
        return target
    config = model.config.get_text_config()
    settings = [name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None) == window]
    log.warning(
        "the context window is %d of the model's %d tokens: %s keeps to %s=%d by its mask alone, which ragspec's "
        "attention does not read",
        window,
        target.context_window,
        type(model).__name__,
        " or ".join(settings),
        window,
    )
    return replace(target, context_window=window)


@torch.inference_mode()
def _check_attention(target: TransformersTarget) -> TransformersTarget:
    """Compare our attention with the model's own on a few tokens, in a chunk and a step, so that both paths run.

    Returns:
        The target, with what each layer stores and the context within which the two are the same.
    """
    model = target.model
    try:
        target = _within_windows(target)
        length = min(48, target.context_window)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(target.vocabulary, (length,), generator=generator).tolist()
        cut = length - 6
        ours: list[Tensor] = []
        cache = SlotCache(slots=2, capacity=length)
        for start, end in ((0, cut), (cut, length)):
            segment = Segment(1, start, end - start)
            ours.append(target.forward(cache, [segment], tokens[start:end], list(range(end - start))).logits)
        layers = model.config.get_text_config().num_hidden_layers
        if len(cache.layout) != layers:
            msg = f"{len(cache.layout)} of its {layers} layers attend through transformers' attention interface"
            raise RuntimeError(msg)  # noqa: TRY301 - every reason leaves by the same sentence below
        model.set_attn_implementation("eager")
        theirs = model(input_ids=torch.tensor([tokens], device=target.device), use_cache=False).logits[0]
    except Exception as error:
        msg = f"The architecture {type(model).__name__} does not run on ragspec's attention: {error}"
        raise ModelUnavailableError(
            msg, "Choose a decoder-only model with softmax attention in every layer.", code="unsupported_architecture"
        ) from error
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    expected = theirs.float().log_softmax(-1)
    divergence = (expected.exp() * (expected - torch.cat(ours).float().log_softmax(-1))).sum(-1)
    worst = float(divergence.max())
    log.info("attention checked", extra={"action": "check_attention", "divergence_nats": worst})
    if not worst <= CHECK_TOLERANCE[model.dtype]:
        msg = f"On {type(model).__name__}, what ragspec's attention gives diverges from the model's own by {worst:.3g} nats."
        raise ModelUnavailableError(
            msg,
            "This architecture needs more than causal or sliding-window attention.",
            code="unsupported_architecture",
        )
    return replace(target, cache_layout=cache.layout)
