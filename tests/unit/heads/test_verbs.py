"""`ragspec head` from data to curves, on a model of a few thousand numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragspec.cli.head import head
from ragspec.errors import RagspecError
from tests import tiny

#: Of the three topics that this seed draws, one is held back.
SEED = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    target = tiny.target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODEL": model, "PRECISION": "float32", "HOME": tmp_path / "home"}.items():
        monkeypatch.setenv(f"RAGSPEC_{name}", str(value))

    def invoke(*arguments: str | Path) -> Result:
        return CliRunner().invoke(head, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "some.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"what about {i} and {i}?"}) + "\n" for i in range(3)))
    return path


def test_from_data_to_curves(run, prompts: Path, tmp_path: Path) -> None:
    recorded = run("data", "answers", "--topics", "3", "--seed", SEED)
    assert recorded.exit_code == 0, recorded.output
    assert "written to answers" in recorded.output
    again = run("data", "answers", "--topics", "3", "--seed", SEED)
    assert "0 tokens written to answers; it has all these answers already" in again.output
    small = ("--inner", 32, "--draft-tokens", 100, "--epochs", 1)
    trained = run("train", "answers", "mine", *small)
    assert trained.exit_code == 0, trained.output
    assert "mean acceptance length" in trained.output
    assert (tmp_path / "mine" / "report.html").read_text().startswith("<!doctype html>")

    measured = run("eval", "mine", "--prompts", prompts, "--max-tokens", 8, "--json")
    rows = [json.loads(line) for line in measured.stdout.splitlines()]
    assert [row["drafts"] for row in rows] == ["lookup", "head", "hybrid"]
    assert all(row["mean_acceptance_length"] >= 1 for row in rows)
    assert "a draft step takes" in run("eval", "mine", "--prompts", prompts, "--max-tokens", 8).output

    card = json.loads(run("info", "mine", "--json").stdout)
    assert card["architecture"] == "recurrent"
    assert card["training"]["recipe"]["inner"] == 32
    assert "recurrent head for" in run("info", "mine").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "nowhere", "out"), "nowhere holds no recorded answers"),
        (("eval", "nowhere"), "nowhere holds no speculation head"),
        (("info", "nowhere"), "nowhere holds no speculation head"),
        (("train", "nowhere", "out", "--learning-rate", "nan"), "learning-rate is nan"),
    ],
)
def test_what_is_not_there_is_named(run, arguments: tuple[str, ...], said: str) -> None:
    failure = run(*arguments).exception

    assert isinstance(failure, RagspecError)
    assert said in failure.message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("data", "out", "--questions", "{prompts}"), "--questions goes with --collection"),
        (("data", "out", "--top-k", "2"), "--top-k goes with --collection"),
        (("data", "out", "--collection", "c", "--topics", "2"), "--topics goes without --collection"),
        (("data", "out", "--job", "last", "--topics", "2"), "--topics goes without --job"),
        (("data", "out", "--job", "last", "--collection", "c"), "--job goes without --collection"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(
    run, prompts: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = run(*(argument.format(prompts=prompts) for argument in arguments))

    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("content", ["", "not json\n", '{"question": "x"}\n'])
def test_prompts_that_cannot_be_read_are_refused(run, content: str, tmp_path: Path) -> None:
    run("data", "answers", "--topics", "3", "--seed", SEED)
    run("train", "answers", "mine", "--inner", 32, "--draft-tokens", 100, "--epochs", 1)
    path = tmp_path / "bad.jsonl"
    path.write_text(content)

    failure = run("eval", "mine", "--prompts", path).exception

    assert isinstance(failure, RagspecError)
    assert "bad.jsonl" in failure.message
