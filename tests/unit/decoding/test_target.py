"""A target is checked before it is trusted."""

from __future__ import annotations

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM

from ragspec.decoding.cuda_graphs import GraphRecorder
from ragspec.decoding.engine import Engine
from ragspec.decoding.loading import CudaGraphs, make_recorder, resolve_device, resolve_dtype
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import StepOutput
from ragspec.decoding.transformers_target import TransformersTarget, make_target
from ragspec.errors import ModelUnavailableError, SettingsError
from tests import tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_the_softmax(dtype: torch.dtype) -> None:
    """Number by number and by torch's operators: both ways that `StepOutput` has."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(5)).to(dtype)
    output = StepOutput(logits, logits.argmax(-1), logits.float().logsumexp(-1))
    places = [(0, 3), (5, 39), (5, 0), (2, 17)]

    expected = logits.float().log_softmax(-1)

    assert output.logprobs(places) == pytest.approx([float(expected[place]) for place in places], abs=1e-6)
    assert output.logprobs([]) == []


def test_an_architecture_with_its_own_attention_is_refused() -> None:
    """Bloom adds position biases to its scores, outside the interface that we stand in for."""
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))

    with pytest.raises(ModelUnavailableError) as raised:
        make_target(model, tiny.tokenizer(), "bloom")
    assert raised.value.error_code == "unsupported_architecture"


def test_attention_that_parts_from_the_models_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load compares distributions, not merely that it runs."""
    model = LlamaForCausalLM(tiny.target().model.config)
    rotary = type(model.model.rotary_emb)
    original = rotary.forward

    def shifted(self, x, position_ids, *args, **kwargs):
        angle = original(self, x, position_ids, *args, **kwargs)
        return angle if model.config._attn_implementation == "eager" else (angle[0], -angle[1])

    monkeypatch.setattr(rotary, "forward", shifted)
    # Turning every position the other way keeps relative distances but not their sign.
    model.model.layers[0].self_attn.k_proj.weight.data += 0.5

    with pytest.raises(ModelUnavailableError, match="diverges from the model's own"):
        make_target(model, tiny.tokenizer(), "shifted")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("repetition_penalty", 1.1), ("no_repeat_ngram_size", 3), ("min_new_tokens", 2), ("suppress_tokens", [5])],
)
def test_generation_settings_that_are_not_followed_are_told(
    setting: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen2.5-Instruct brings a repetition penalty; its `generate` then writes something else than its argmax."""
    model = LlamaForCausalLM(tiny.target().model.config)
    setattr(model.generation_config, setting, value)

    make_target(model, tiny.tokenizer(), "penalised")

    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"the model's generation config sets {setting}={value}: `generate` obeys, ragspec writes the plain argmax"
    ]


def test_a_plain_generation_config_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = LlamaForCausalLM(tiny.target().model.config)
    model.generation_config.repetition_penalty = 1.0

    make_target(model, tiny.tokenizer(), "plain")

    assert not [record for record in caplog.records if record.levelname == "WARNING"]


SCALED: dict[str, dict[str, object]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
    },
}


@pytest.mark.parametrize(("kind", "longest", "window"), [("dynamic", 64, 64), ("longrope", 256, 64)])
def test_a_sequence_that_fills_the_window_turns_no_other_ones_positions(kind: str, longest: int, window: int) -> None:
    """Scaled rotary embeddings follow the longest position of the whole pass, which may be a neighbour's."""
    config = tiny.FAMILIES["llama"].from_dict(
        {
            **tiny.target().model.config.to_dict(),
            "max_position_embeddings": longest,
            "rope_parameters": {"rope_theta": 10000.0, **SCALED[kind]},
        }
    )
    torch.manual_seed(3)
    aim = make_target(LlamaForCausalLM(config), tiny.tokenizer(), kind)
    prompt = tuple(range(40, 70))
    short = Request("short", prompt, Sampling(max_tokens=10))
    # Its prompt leaves one place, so that it is at the window's end while the short one decodes.
    full = Request("full", tuple(range(window - 1)), Sampling(max_tokens=10))

    rotary = aim.model.model.rotary_emb
    before = rotary.inv_freq.clone()
    together = _answers(aim, [short, full], context_window=longest)

    assert aim.context_window == window
    assert together["short"] == _answers(aim, [short], context_window=longest)["short"]
    assert torch.equal(rotary.inv_freq, before)


def _answers(aim: TransformersTarget, requests: list[Request], context_window: int) -> dict[str, tuple[int, ...]]:
    engine = Engine(aim, max_batch=4, context_window=context_window, drafters=[])
    for request in requests:
        engine.add(request)
    answers = {}
    while engine.has_work:
        answers |= {done.request_id: done.acceptance.token_ids for done in engine.step()}
    return answers


def test_auto_takes_what_the_machine_has() -> None:
    device = resolve_device("auto")

    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("float32", device) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize(
    ("device", "cuda_graphs", "recorded"), [("cuda", "auto", True), ("cuda", "off", False), ("cpu", "auto", False)]
)
def test_cuda_graphs_are_for_cuda_and_can_be_turned_off(device: str, cuda_graphs: CudaGraphs, recorded: bool) -> None:
    assert isinstance(make_recorder(torch.device(device), cuda_graphs), GraphRecorder) == recorded


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_names_the_setting() -> None:
    with pytest.raises(SettingsError, match="RAGSPEC_DEVICE='cuda:1'"):
        resolve_device("cuda:1")
