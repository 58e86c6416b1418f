"""A window that a model's own attention keeps to by its mask alone ends the context; one that it names does not."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.transformers_target import TransformersTarget, make_target
from tests import tiny

WINDOW = 64
#: Tokens of prompt and answer that the tiny models' positions allow.
POSITIONS = 512

_QWEN2_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 2}
#: What tells the layers' window by a mask: sliding in some layers, chunked in all but the last, sliding in all.
MASKED: dict[str, tuple[type[PreTrainedConfig], str, dict[str, object]]] = {
    "qwen2_moe": (Qwen2MoeConfig, "sliding_window", {**_QWEN2_MOE, "use_sliding_window": True}),
    "llama4": (
        Llama4TextConfig,
        "attention_chunk_size",
        {"num_local_experts": 2, "intermediate_size_mlp": 96, "no_rope_layer_interval": 3},
    ),
    "phimoe": (PhimoeConfig, "sliding_window", {"num_local_experts": 2}),
}


@lru_cache
def masked(family: str, window: int = WINDOW) -> TransformersTarget:
    """A seeded model whose layers' window stands in the mask alone."""
    kind, setting, extra = MASKED[family]
    return seeded(tiny.shaped(kind, **{**extra, setting: window}))


def seeded(config: PreTrainedConfig) -> TransformersTarget:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tiny.END
    return make_target(model, tiny.tokenizer(), type(model).__name__)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("family", sorted(MASKED))
def test_a_window_that_stands_in_the_mask_alone_ends_the_context(family: str, caplog: pytest.LogCaptureFixture) -> None:
    masked.cache_clear()

    target = masked(family)

    name, setting = type(target.model).__name__, MASKED[family][1]
    assert target.context_window == WINDOW
    (warning,) = warnings(caplog)
    assert warning.startswith(f"the context window is {WINDOW} of the model's {POSITIONS} tokens")
    assert f"{name} keeps to {setting}={WINDOW} by its mask alone" in warning


@pytest.mark.parametrize("family", sorted(MASKED))
def test_up_to_such_a_window_answers_are_those_of_generate(family: str) -> None:
    """Every prompt asks for more than the window; its answer ends there, and is the beginning of what `generate` writes."""
    target = masked(family)
    requests = make_requests()
    expected = {r.id: tiny.generate(target, r)[: WINDOW - len(r.prompt)] for r in requests}

    done = answers(target, requests)

    assert done == expected
    assert sum(len(r.prompt) + len(done[r.id]) == WINDOW for r in requests) > 12


@pytest.mark.parametrize("family", sorted(MASKED))
def test_past_such_a_window_they_would_part(family: str) -> None:
    """What the window's end is for: nothing parts before it."""
    target = masked(family)
    requests = make_requests()
    expected = {r.id: tiny.generate(target, r) for r in requests}

    done = answers(replace(target, context_window=POSITIONS), requests)

    wrong = [
        len(request.prompt) + place
        for request in requests
        for place, (ours, theirs) in enumerate(zip(done[request.id], expected[request.id], strict=False))
        if ours != theirs
    ]
    assert len(wrong) > 100
    assert min(wrong) > WINDOW


def make_requests() -> list[Request]:
    rng = random.Random(4)
    lengths = [*(rng.randint(1, WINDOW - 2) for _ in range(23)), WINDOW - 1]
    prompts = [tuple(rng.randrange(256) for _ in range(length)) for length in lengths]
    return [Request(f"r{i}", prompt, Sampling(max_tokens=90)) for i, prompt in enumerate(prompts)]


def answers(target: TransformersTarget, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    engine = Engine(target, max_batch=5, prefill_chunk=40)
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_work:
        done |= {completion.request_id: completion.acceptance.token_ids for completion in engine.step()}
    return done


def test_a_window_of_fewer_tokens_than_the_check_reads_is_no_reason_to_refuse_a_model() -> None:
    assert masked("qwen2_moe", 24).context_window == 24


@pytest.mark.parametrize(
    "config",
    [
        *(tiny.config(family) for family in ("mistral", "gemma2", "gpt_oss")),
        *(
            tiny.config(family, use_sliding_window=True, sliding_window=24, max_window_layers=1)
            for family in ("qwen2", "qwen3")
        ),
        tiny.shaped(Gemma3TextConfig, sliding_window=24, sliding_window_pattern=2),
    ],
    ids=lambda config: config.model_type,
)
def test_a_window_that_the_attention_call_names_ends_nothing(
    config: PreTrainedConfig, caplog: pytest.LogCaptureFixture
) -> None:
    target = seeded(config)

    assert config.sliding_window == 24
    assert target.context_window == POSITIONS
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "config",
    [
        tiny.shaped(Qwen2MoeConfig, **_QWEN2_MOE, sliding_window=WINDOW),
        tiny.shaped(Llama4TextConfig, **MASKED["llama4"][2], attention_chunk_size=None),
        tiny.shaped(PhimoeConfig, **MASKED["phimoe"][2], sliding_window=POSITIONS),
    ],
    ids=lambda config: config.model_type,
)
def test_a_window_that_is_off_or_as_long_as_the_positions_ends_nothing(
    config: PreTrainedConfig, caplog: pytest.LogCaptureFixture
) -> None:
    target = seeded(config)

    assert target.context_window == POSITIONS
    assert warnings(caplog) == []
