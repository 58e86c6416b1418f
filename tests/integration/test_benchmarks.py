"""The benchmarks that people rerun do run, at sizes that take seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpu_check_finds_the_engine_exact_on_a_tiny_model_and_prints_one_table() -> None:
    page = run("benchmarks.gpu_check", "--small", "--new-tokens", "6")

    for kind in ("float32", "float32, no graphs"):
        assert f"exactness, {kind}: 0 of 14 answers part from the reference" in page
    assert re.search(r"^steps replayed: [1-9]\d*$", page, re.MULTILINE)
    for way in ("ragspec", "ragspec, no drafts", "ragspec, no graphs", "transformers", "transformers, continuous"):
        assert sum(line[7:31].strip() == way for line in page.splitlines()) == 3
    assert page.count("transformers, lookup") == 1


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
