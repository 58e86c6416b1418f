"""The resident process loads what the settings say, under the names that all else knows it by."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.models import model_identity
from ragspec.settings import Settings
from tests import tiny
from worker.resident.process import load_parts


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A target where a hub client would put it: the folder's name is the revision's."""
    folder = tmp_path / "models--org--tiny" / "snapshots" / "0123abcd"
    aim = tiny.target()
    aim.model.save_pretrained(folder)
    aim.tokenizer.save_pretrained(folder)
    return folder


def test_a_hub_models_answers_carry_its_whole_id(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity is the one that other parts make of the setting, owner included; the precision stands behind it."""
    monkeypatch.setattr("ragspec.decoding.loading.ensure_target", lambda _: snapshot)
    monkeypatch.setattr("ragspec.corpus.embedder.load_embedder", lambda _: None)
    monkeypatch.setattr("ragspec.corpus.retriever.load_retriever", lambda _settings, _embedder: None)

    parts = load_parts(Settings(model="org/tiny", device="cpu", precision="float32", home=tmp_path / "home"))

    assert parts.model == model_identity("org/tiny", snapshot) + "+float32"
    assert parts.model.startswith("org/tiny@")
