"""Published EAGLE-3 heads that are read, and those that are refused with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from ragspec.cli.head import head as head_verb
from ragspec.decoding.feature_drafter import AttentionDrafter
from ragspec.decoding.target import StepOutput, Target
from ragspec.errors import InputError, RagspecError, SettingsError
from ragspec.heads.architecture import make_head
from ragspec.heads.card import CARD, HeadCard, read_head_card
from ragspec.heads.checkpoint import load_head, save_head
from ragspec.heads.loading import load_head_drafter
from ragspec.heads.shape import AttentionShape, HeadShape
from tests import tiny
from tests.unit.heads import published


def write(folder: Path, **changes: Any) -> Path:
    config = published.configuration(tiny.target(), **changes)
    return published.write(folder, config, published.weights(published.configuration(tiny.target())))


def test_a_published_head_is_named_by_its_weights(tmp_path: Path) -> None:
    drafter = load_head_drafter(str(write(tmp_path)), tiny.target())

    assert isinstance(drafter, AttentionDrafter)
    assert drafter.identity.startswith("attention@")
    assert len(drafter.identity) == len("attention@") + 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "architectures=.'LlamaForCausalLMEagle'"),
        ({"architectures": None}, "architectures="),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"norm_before_residual": True}, "norm_before_residual=True"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic', not one of default"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"hidden_size": "48"}, "hidden_size='48'"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"num_key_value_heads": 4}, "key_heads=4"),
        ({"intermediate_size": 41}, r"midlayer.mlp.down_proj.weight has the shape \[48, 40\]"),
        ({"draft_vocab_size": 130}, "d2t has the shape|lm_head.weight has the shape"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, r"fc.weight has the shape \[48, 144\]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, -1]}, "layers="),
        ({"eagle_config": [0, 1, 2]}, "eagle_config="),
        ({"draft_vocab_size": "129"}, "d2t has the shape|lm_head.weight has the shape"),
    ],
)
def test_variants_that_are_not_computed_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said) as caught:
        load_head(write(tmp_path, **changes))
    assert caught.value.error_code == "bad_head"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("missing", "lack midlayer.hidden_norm.weight"),
        ("strange", "hold midlayer.self_attn.q_proj.bias"),
        ("no offsets", "129 of 258 tokens, and no d2t"),
        ("tied", "tie_word_embeddings=True"),
        ("outside", "outside its vocabulary"),
        ("twice", "twice or out of order"),
        ("not finite", "no numbers"),
        ("bad rope", "factor|cannot be read"),
    ],
)
def test_weights_that_are_no_heads_are_refused(damage: str, said: str, tmp_path: Path) -> None:
    config = published.configuration(tiny.target())
    tensors = published.weights(config)
    match damage:
        case "missing":
            del tensors["midlayer.hidden_norm.weight"]
        case "strange":
            tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(48)
        case "no offsets":
            del tensors["d2t"]
        case "tied":
            config["tie_word_embeddings"] = True
            tensors["embed_tokens.weight"] = torch.zeros(258, 48)
            del tensors["lm_head.weight"]
        case "outside":
            tensors["d2t"][-1] += 200
        case "twice":
            tensors["d2t"][5] -= 2
        case "not finite":
            tensors["norm.weight"][3] = torch.nan
        case "bad rope":
            config["rope_scaling"] = {"rope_type": "llama3"}
    published.write(tmp_path, config, tensors)

    with pytest.raises(InputError, match=said) as caught:
        load_head(tmp_path)
    assert caught.value.error_code == "bad_head"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("cut", "holds no speculation head|cannot be read"),
        ("pickle", "no model.safetensors but pytorch_model.bin: convert"),
        ("not json", "holds no speculation head"),
        ("list", "no JSON object"),
    ],
)
def test_damaged_files_are_refused(damage: str, said: str, tmp_path: Path) -> None:
    weights = write(tmp_path) / "model.safetensors"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "pickle":
            weights.rename(tmp_path / "pytorch_model.bin")
        case "not json":
            (tmp_path / "config.json").write_text("{")
        case "list":
            (tmp_path / "config.json").write_text("[]")

    with pytest.raises(InputError, match=said) as caught:
        load_head(tmp_path)
    assert caught.value.error_code == "bad_head"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_hidden_size": 64}, "its states are 64 wide, the target's 48"),
        ({"vocab_size": 260}, "its vocabulary has 260 tokens, the target's 258"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, r"layers \(0, 2, 4\), the target has 3"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = published.configuration(tiny.target(), **changes)
    tensors = published.weights(config)
    if "target_hidden_size" in changes:
        tensors["embed_tokens.weight"] = torch.zeros(258, 48)
    published.write(tmp_path, config, tensors)

    with pytest.raises(SettingsError, match=said):
        load_head_drafter(str(tmp_path), tiny.target())


class Layered:
    """A target whose layers pass several states of a token on, as Gemma 3n's do, or none at all."""

    def __init__(self, target: Target, *, states: int) -> None:
        self._target, self._states = target, states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, *step: Any, features: Sequence[int]) -> StepOutput:
        if not self._states:
            raise RuntimeError("stack expects each tensor to be equal size")
        out = self._target.forward(*step, features=features)
        assert out.features is not None
        return replace(out, features=out.features[:, :, None].expand(-1, -1, self._states, -1))


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (4, r"of one token they are \[1, 3, 4, 48\], not \[1, 3, 48\]"),
        (0, "the target does not give them: stack expects"),
    ],
)
def test_a_target_whose_layers_pass_on_something_else_is_refused(states: int, said: str, tmp_path: Path) -> None:
    config = published.configuration(tiny.target())
    published.write(tmp_path, config, published.weights(config))

    with pytest.raises(SettingsError, match=said):
        load_head_drafter(str(tmp_path), Layered(tiny.target(), states=states))


def test_a_head_of_another_width_cannot_borrow(tmp_path: Path) -> None:
    config = published.configuration(tiny.target(), hidden_size=32, target_hidden_size=48)
    published.write(tmp_path, config, published.weights(config))

    with pytest.raises(InputError, match="32 wide and borrows"):
        read_head_card(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, ""), ({"hidden_act": "gelu"}, "hidden_act='gelu'"), ({"weights": None}, "no model.safetensors")],
)
def test_a_published_head_is_checked_before_torch_is_there(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Before anything is started: a worker that finds it out late has loaded a model for nothing."""
    write(tmp_path, **changes)
    if "weights" in changes:
        (tmp_path / "model.safetensors").unlink()
    code = """
import sys
from ragspec.errors import SettingsError
from ragspec.services.preflight import check_worker
from ragspec.settings import load_settings
try:
    check_worker(load_settings(head=sys.argv[1]))
except SettingsError as error:
    print(error.message)
assert "torch" not in sys.modules
"""

    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)

    assert bool(done.stdout) == bool(said)
    assert said in done.stdout


def own_head(folder: Path) -> tuple[torch.nn.Module, HeadCard]:
    layer = AttentionShape(4, 2, 8, 48, layers=(0, 1, 2), rope={"rope_type": "default", "rope_theta": 700.0})
    shape = HeadShape(48, 40, tuple(range(0, 258, 3)), attention=layer)
    torch.manual_seed(1)
    head = make_head("attention", shape)
    attention = {
        "heads": 4,
        "key_heads": 2,
        "head_dim": 8,
        "width": 48,
        "layers": [0, 1, 2],
        "rope": {"rope_type": "default", "rope_theta": 700.0},
    }
    card = HeadCard("attention", "tiny-llama@seed7", 258, 48, 40, 4, 1e-5, attention=attention)
    save_head(head, card, folder)
    return head, card


def test_an_attention_head_of_our_own_comes_back_as_it_was(tmp_path: Path) -> None:
    head, card = own_head(tmp_path)
    read, found = load_head(tmp_path)

    assert found == card
    assert read.shape == head.shape
    for name, value in head.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], value, rtol=1e-2, atol=1e-2)
    assert isinstance(load_head_drafter(str(tmp_path), tiny.target()), AttentionDrafter)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("heads", 0),
        ("key_heads", 3),
        ("head_dim", 7),
        ("width", "48"),
        ("layers", [0, 1, 2.0]),
        ("own_embeddings", -1),
        ("own_output", 1),
        ("rope", {"rope_type": "dynamic", "rope_theta": 1e4}),
        ("rope", {"rope_type": "default"}),
        ("rope", {"rope_type": "default", "rope_theta": 0}),
        ("rope", 5),
        ("strange", 5),
    ],
)
def test_a_card_with_wrong_numbers_of_attention_is_refused(name: str, wrong: object, tmp_path: Path) -> None:
    own_head(tmp_path)
    card = json.loads((tmp_path / CARD).read_text())
    (tmp_path / CARD).write_text(json.dumps(card | {"attention": card["attention"] | {name: wrong}}))

    with pytest.raises(InputError, match=name) as caught:
        read_head_card(tmp_path)
    assert caught.value.error_code == "bad_head"


@pytest.mark.parametrize("changes", [{"attention": None}, {"attention": [1]}, {"architecture": "recurrent"}], ids=str)
def test_numbers_of_attention_belong_to_attention_heads(changes: dict[str, object], tmp_path: Path) -> None:
    own_head(tmp_path)
    card = json.loads((tmp_path / CARD).read_text())
    (tmp_path / CARD).write_text(json.dumps(card | changes))

    with pytest.raises(InputError, match="attention=") as caught:
        read_head_card(tmp_path)
    assert caught.value.error_code == "bad_head"


def test_the_verbs_take_a_published_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, folder = tiny.target(), write(tmp_path / "eagle3")
    target.model.save_pretrained(tmp_path / "model")
    target.tokenizer.save_pretrained(tmp_path / "model")
    for name, value in {"MODEL": tmp_path / "model", "PRECISION": "float32", "HOME": tmp_path / "home"}.items():
        monkeypatch.setenv(f"RAGSPEC_{name}", str(value))
    (tmp_path / "some.jsonl").write_text('{"prompt": "what about this?"}\n')

    shown = CliRunner().invoke(head_verb, ["info", str(folder)])
    measured = CliRunner().invoke(
        head_verb, ["eval", str(folder), "--prompts", str(tmp_path / "some.jsonl"), "--max-tokens", "12", "--json"]
    )

    assert "attention head for a target of 258 tokens whose states are 48 wide" in shown.output
    rows = {row["drafts"]: row for row in map(json.loads, measured.stdout.splitlines())}
    assert rows["head"]["draft_step_ms"] > 0


def test_a_folder_with_another_model_is_refused_by_its_setting(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, write(tmp_path, architectures=["LlamaForCausalLM"]) / "model.safetensors")

    with pytest.raises(RagspecError, match=r"RAGSPEC_HEAD=.*lack fc\.weight"):
        load_head_drafter(str(tmp_path), tiny.target())
