"""The benchmarks that people rerun do run, at sizes that take seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from ragspec.decoding import recorded_steps
from ragspec.decoding.recorder import PlainRecorder, Replay

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpu_check_finds_the_engine_exact_on_a_tiny_model_and_prints_one_table() -> None:
    page = run("benchmarks.gpu_check", "--small", "--new-tokens", "6")

    for kind, replayed in (("float32", r"[1-9]\d*"), ("float32, no graphs", "0")):
        found = rf"^exactness, {kind}: 0 of 14 answers part from the reference; .*; {replayed} steps replayed$"
        assert re.search(found, page, re.MULTILINE)
    for way in ("ragspec", "ragspec, no drafts", "ragspec, no graphs", "transformers", "transformers, continuous"):
        assert sum(line[7:31].strip() == way for line in page.splitlines()) == 3
    assert page.count("transformers, lookup") == 1


def _refuse(*_: object) -> Replay:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        (PlainRecorder, "record", _refuse, "; 0 steps replayed, then graphs given up"),
        (recorded_steps, "MOST_RECORDINGS", 0, "; 0 steps replayed\n"),
    ],
)
def test_gpu_check_fails_where_no_graph_runs_though_every_answer_is_right(
    part: object,
    name: str,
    value: object,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(part, name, value)
    monkeypatch.setattr(gpu_check, "make_recorder", lambda *_: PlainRecorder())
    monkeypatch.setattr(gpu_check, "measure", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--small", "--new-tokens", "4"])

    with pytest.raises(SystemExit) as left:
        gpu_check.main()

    page = capsys.readouterr().out
    assert left.value.code == 1
    assert "exactness, float32: 0 of 14 answers part from the reference" in page
    assert said in page


@pytest.mark.model
def test_peers_measures_what_is_there_and_says_what_is_not(tmp_path: Path) -> None:
    output = tmp_path / "result.md"

    run(
        *("benchmarks.peers", "--limit", "1", "--max-tokens", "4", "--rounds", "1", "--peers", "ragspec,vllm"),
        *("--environments", str(tmp_path), "--logs", str(tmp_path / "logs"), "--output", str(output)),
    )

    page = output.read_text()
    assert re.search(r"^\| ragspec \| \d+\.\d+ \|", page, re.MULTILINE)
    assert "| vllm | failed: not installed" in page
