"""The shipped head's recipe from end to end, at a size of seconds, on texts that need no registry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ragspec.heads.recipe.__main__ import main
from ragspec.heads.store import is_held_back

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
#: Titles of the documents: answers about some are held back, about others not.
TITLES = [f"Port {number}" for number in range(60)]

BUDGET = ("--budget-hours", "0.002")


def make(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ragspec.heads.recipe", str(folder), *BUDGET, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_one_command_makes_a_head_with_card_curves_and_figures_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert {is_held_back(title) for title in TITLES} == {True, False}
    texts = tmp_path / "texts"
    texts.mkdir()
    sentence = (
        "The harbour of {0} was built by Anna Berg in {1}, and the ships of the Northern Line call there weekly. "
    )
    for number, title in enumerate(TITLES):
        (texts / f"{title}.txt").write_text(sentence.format(title, 1800 + number) * 2)
    (tmp_path / "excluded.txt").write_text("the harbour of Port 7 was built by Anna Berg")
    options = ("--texts", str(texts), "--exclude", str(tmp_path / "excluded.txt"))

    made = make(tmp_path / "out", *options)

    assert made.returncode == 0, made.stderr
    head = tmp_path / "out" / "head"
    card = json.loads((head / "card.json").read_text())
    assert card["inner"] == 2048
    assert {"topics", "passages", "train"} <= card["training"]["made"]["stages"].keys()
    assert card["training"]["made"]["commit"]
    assert {row["drafts"] for row in card["measured"]["decoding"]} == {"lookup", "head", "hybrid"}
    assert card["measured"]["decoding"] == json.loads((head / "figures.json").read_text())
    assert "mean acceptance length" in made.stdout
    assert "Mean acceptance length" in (head / "report.html").read_text()
    assert card["training"]["made"]["stages"]["plan"]["passages left out"] == 1

    weights = (head / "head.safetensors").read_bytes()
    again = CliRunner().invoke(main, [str(tmp_path / "out"), *BUDGET, *options])
    assert again.stderr.count("done before") == 6
    assert (head / "head.safetensors").read_bytes() == weights
