"""A head that cannot draft for a target is refused, with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragspec.decoding.target import Target
from ragspec.errors import InputError, SettingsError
from ragspec.heads.card import CARD, WEIGHTS
from ragspec.heads.checkpoint import load_head
from ragspec.heads.loading import find_head
from ragspec.heads.training import train
from tests import tiny
from tests.unit.heads.recorded import RECIPE


def test_a_folder_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        train(tiny.smallest(), tmp_path, tmp_path, RECIPE)
    assert caught.value.error_code == "no_head_data"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            replace(tiny.smallest(), identity="other@seed6+int8"),
            "it was trained for smallest-llama@seed5, the target is other",
        ),
        (tiny.target(), "its states are 16 wide, the target's 48"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(trained: Path, target: Target, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        find_head(str(trained), target)


def test_auto_and_none_need_no_head() -> None:
    assert find_head("auto", tiny.smallest()) is None
    assert find_head("none", tiny.smallest()) is None


def test_a_folder_without_a_head_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"RAGSPEC_HEAD=.*holds no speculation head"):
        find_head(str(tmp_path), tiny.smallest())


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": 5},
        {"architecture": None},
        {"depth": None},
        {"depth": "4"},
        {"depth": 0},
        {"inner": 0},
        {"hidden": "64"},
        {"vocabulary": True},
        {"epsilon": None},
        {"epsilon": float("nan")},
    ],
)
def test_a_card_with_wrong_values_is_refused_by_their_names(
    trained: Path, tmp_path: Path, wrong: dict[str, object]
) -> None:
    card = json.loads((trained / CARD).read_text()) | wrong
    (tmp_path / CARD).write_text(json.dumps(card))
    (tmp_path / WEIGHTS).write_bytes((trained / WEIGHTS).read_bytes())

    with pytest.raises(InputError, match=next(iter(wrong))) as caught:
        load_head(tmp_path)
    assert caught.value.error_code == "bad_head"


@pytest.mark.parametrize("damage", ["not finite", "twice", "falling", "two rows"])
def test_weights_that_no_head_has_are_refused(trained: Path, tmp_path: Path, damage: str) -> None:
    tensors = load_file(trained / WEIGHTS)
    tokens = tensors["draft_tokens"]
    match damage:
        case "not finite":
            name = next(name for name in tensors if name != "draft_tokens")
            tensors[name] = torch.full_like(tensors[name], float("nan"))
        case "twice":
            tensors["draft_tokens"] = torch.zeros_like(tokens)
        case "falling":
            tensors["draft_tokens"] = tokens.flip(0).contiguous()
        case _:
            tensors["draft_tokens"] = torch.stack([tokens, tokens])
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CARD).write_bytes((trained / CARD).read_bytes())

    with pytest.raises(InputError) as caught:
        load_head(tmp_path)
    assert caught.value.error_code == "bad_head"


@pytest.mark.parametrize("damage", ["cut", "other shape", "missing", "bad card"])
def test_a_damaged_head_is_refused(trained: Path, tmp_path: Path, damage: str) -> None:
    card = json.loads((trained / CARD).read_text())
    weights = (trained / WEIGHTS).read_bytes()
    if damage == "other shape":
        card["inner"] = 32
    (tmp_path / CARD).write_text("[]" if damage == "bad card" else json.dumps(card))
    if damage != "missing":
        (tmp_path / WEIGHTS).write_bytes(weights[:-100] if damage == "cut" else weights)

    with pytest.raises(InputError) as caught:
        load_head(tmp_path)
    assert caught.value.error_code == "bad_head"
