"""A head's training text out of a job's answers, on a real PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine

from ragspec.cli.head import head
from ragspec.corpus.passage import Passage
from ragspec.decoding.loading import load_configured
from ragspec.errors import InputError
from ragspec.heads.store import answer_files, read_answers
from ragspec.jobs.answer import Answer
from ragspec.jobs.answers import record_answers
from ragspec.prompt import PromptBuilder
from ragspec.settings import load_settings
from tests import tiny
from tests.integration.jobs.worlds import claim, completed, make_job

pytestmark = pytest.mark.services

PASSAGE = {"id": "p1", "document": "a.md", "title": "A", "score": 0.5, "text": "Paris it is", "metadata": {}}


@pytest.fixture
def environment(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target()
    target.model.save_pretrained(tmp_path / "model")
    target.tokenizer.save_pretrained(tmp_path / "model")
    values = {
        "MODEL": tmp_path / "model",
        "PRECISION": "float32",
        "HOME": tmp_path / "home",
        "DATABASE_URL": database_url,
    }
    for name, value in values.items():
        monkeypatch.setenv(f"RAGSPEC_{name}", str(value))


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(head, [str(argument) for argument in arguments])


@pytest.mark.usefixtures("environment")
def test_a_jobs_answers_become_training_text(engine: Engine, tmp_path: Path) -> None:
    settings = load_settings()
    target = load_configured(settings)
    builder = PromptBuilder(target.tokenizer, min(settings.context_window, target.context_window))
    job_id = make_job(engine, questions=2)

    def answer(idx: int) -> Answer:
        prompt = builder.build(f"question {idx}?", [Passage(**PASSAGE)], 32)
        return replace(
            completed(idx),
            model=target.identity,
            template_hash=builder.template_hash,
            prompt_tokens=len(prompt.token_ids),
            passages=[dict(PASSAGE)],
        )

    record_answers(engine, claim(engine, job_id), [answer(0), replace(answer(1), model="another@1+float32")])

    result = run("data", tmp_path / "out", "--job", "last")

    assert result.exit_code == 0, result.output
    assert "left out: 1 answer written by another model" in result.output
    assert "5 tokens written" in result.output
    (path,) = answer_files(tmp_path / "out")
    kept = read_answers(path)
    assert kept.tokens.tolist() == completed(0).token_ids
    again = run("data", tmp_path / "out", "--job", str(job_id)[:8])
    assert "0 tokens written" in again.output


@pytest.mark.usefixtures("environment")
def test_a_job_without_usable_answers_says_why(engine: Engine, tmp_path: Path) -> None:
    job_id = make_job(engine, questions=2)
    record_answers(engine, claim(engine, job_id), [completed(0), completed(1)])

    result = run("data", tmp_path / "out", "--job", "last")

    assert isinstance(result.exception, InputError)
    assert "2 answers written by another model" in result.exception.message
