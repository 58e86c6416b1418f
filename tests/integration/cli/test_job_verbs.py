"""The job verbs of the command line, on real PostgreSQL and Redis, with a worker played by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from click.testing import CliRunner, Result
from sqlalchemy import Engine

import producer.submit
from ragspec.cli import cli, progress
from ragspec.errors import ConflictError, InputError, NotFoundError
from ragspec.jobs.answers import record_answers
from ragspec.jobs.claims import finish_shard
from ragspec.jobs.status import JobStatus, find_job, job_status
from tests.integration.jobs.worlds import claim, completed, failed, make_job

pytestmark = pytest.mark.services

Run = Callable[..., Result]


@pytest.fixture
def run(
    engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Run]:
    """Run `ragspec ARGUMENTS` in an empty folder on empty services."""
    del engine
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAGSPEC_DATABASE_URL", database_url)
    monkeypatch.setenv("RAGSPEC_REDIS_URL", redis_url)
    monkeypatch.setattr(producer.submit, "check_collection", lambda settings, name: None)
    (tmp_path / "q.jsonl").write_text(
        '{"id": "q0", "question": "Capital of France?", "answers": ["Paris"], "passage_id": "p1"}\n'
        '{"id": "q1", "question": "Capital of Italy?", "answers": ["Rome"], "passage_id": "p2"}\n'
    )
    yield lambda *arguments: CliRunner().invoke(cli, list(arguments))
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()


def finish(engine: Engine, job_id: UUID, *answers: Any) -> None:
    held = claim(engine, job_id)
    record_answers(engine, held, answers)
    finish_shard(engine, held)


def test_submit_prints_the_job_and_with_json_its_status(run: Run, engine: Engine) -> None:
    plain = run("submit", "q.jsonl", "--collection", "handbook")
    again = run("submit", "q.jsonl", "--collection", "handbook", "--json")

    assert plain.exit_code == 0
    assert UUID(plain.stdout.strip()) == find_job(engine, "last")
    status = json.loads(again.stdout)
    assert (status["job_id"], status["created"], status["questions"]) == (plain.stdout.strip(), False, 2)
    assert "recorded 2 questions, enqueued 1 shard\n" in plain.stderr


def test_resuming_says_which_job_and_how_to_answer_again(run: Run, engine: Engine) -> None:
    run("submit", "q.jsonl", "--collection", "handbook")
    job_id = find_job(engine, "last")
    record_answers(engine, claim(engine, job_id), [completed(0)])

    (line,) = run("submit", "q.jsonl", "--collection", "handbook").stderr.splitlines()

    created = job_status(engine, job_id).created_at.isoformat(sep=" ", timespec="minutes")
    assert line == (
        f"resumed job {job_id}, submitted {created}; 1 of 2 already answered, enqueued 0 shards. "
        "Answer again (after changing model or template, say) with --new."
    )


@pytest.mark.parametrize(("second", "code"), [(completed(1), 0), (failed(1), 3)])
def test_waiting_ends_with_the_job_and_its_outcome(
    run: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch, second: Any, code: int
) -> None:
    def worker(_: float) -> None:
        finish(engine, find_job(engine, "last"), completed(0), second)

    monkeypatch.setattr(progress.time, "sleep", worker)

    result = run("submit", "q.jsonl", "--collection", "handbook", "--wait", "--json")

    assert result.exit_code == code
    status = json.loads(result.stdout)
    assert (status["state"], status["completed"] + status["failed"]) == ("completed", 2)
    assert "completed: 2/2 answered" in result.stderr


def test_a_waiting_terminal_shows_a_bar(
    run: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del run
    job_id = make_job(engine, questions=2)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress.time, "sleep", lambda _: finish(engine, job_id, completed(0), failed(1)))

    status = progress.watch_job(engine, job_id)

    assert isinstance(status, JobStatus)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "1 failed" in shown
    assert "tokens/step" in shown


def test_ctrl_c_leaves_the_job_running_and_says_so(run: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(progress.time, "sleep", interrupt)

    result = run("submit", "q.jsonl", "--collection", "handbook", "--wait")

    assert result.exit_code == 130
    assert "goes on without you" in result.stderr
    assert json.loads(run("status", "last", "--json").stdout)["state"] == "in_progress"


def test_options_reach_the_job_and_wrong_ones_are_named(run: Run, engine: Engine) -> None:
    wanted = ["--top-k", "7", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--no-speculation"]
    wanted += [
        "--min-tokens",
        "4",
        "--repetition-penalty",
        "1.2",
        "--presence-penalty",
        "-1",
        "--frequency-penalty",
        "2",
    ]
    run("submit", "q.jsonl", "--collection", "handbook", "--priority", "interactive", *wanted)

    from sqlalchemy import select

    from ragspec.jobs.tables import Job

    with engine.connect() as connection:
        options = connection.execute(select(Job.options)).scalar_one()
    assert options["top_k"] == 7
    assert options["stop"] == ["a", "b"]
    assert (options["speculation"], options["queue"], options["max_tokens"]) == (False, "interactive", 128)
    assert (options["min_tokens"], options["repetition_penalty"]) == (4, 1.2)
    assert (options["presence_penalty"], options["frequency_penalty"]) == (-1, 2)

    result = run("submit", "q.jsonl", "--collection", "handbook", "--top-p", "2")
    assert isinstance(result.exception, InputError)
    assert "--top-p 2" in str(result.exception)
    result = run("submit", "q.jsonl", "--collection", "handbook", "--min-tokens", "129")
    assert isinstance(result.exception, InputError)
    assert "--min-tokens 129: Value error, more than max_tokens, which is 128." in str(result.exception)


def test_skipped_rows_are_shown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "Who?"}\n{\n')

    result = run("submit", "bad.jsonl", "--collection", "handbook", "--on-error", "skip")

    assert result.exit_code == 0
    assert "skipped line 2: [invalid_json_line]" in result.stderr


def test_status_and_jobs_list_what_there_is(run: Run, engine: Engine) -> None:
    done, open_job = make_job(engine, questions=2), make_job(engine, questions=2)
    finish(engine, done, completed(0), completed(1))

    assert [status["job_id"] for status in json.loads(run("jobs", "--json").stdout)] == [str(open_job), str(done)]
    assert [status["job_id"] for status in json.loads(run("status", "--json").stdout)] == [str(open_job)]
    assert "completed: 2/2 answered" in run("status", str(done)).stdout
    assert "4/6 draft tokens accepted" in run("status", str(done)[:8]).stdout
    assert run("status", str(done), "--watch").exit_code == 0


def test_status_without_unfinished_jobs_says_where_the_finished_ones_are(run: Run, engine: Engine) -> None:
    finish(engine, make_job(engine, questions=2), completed(0), completed(1))

    assert run("status").stderr == "no unfinished jobs; `ragspec jobs` lists all\n"
    assert run("jobs").stdout.count("completed: 2/2 answered") == 1


def test_cancel_and_retry(run: Run, engine: Engine) -> None:
    job_id = make_job(engine, questions=2)
    finish(engine, job_id, completed(0), failed(1))

    assert isinstance(run("cancel", "last").exception, ConflictError)
    assert "1 row will run again" in run("retry", "last").stdout
    assert run("cancel", "last").stdout.endswith(" cancelled\n")
    assert isinstance(run("retry", "last").exception, ConflictError)


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "abc"),
        ("cancel", "abc"),
        ("retry", "abc"),
        ("results", "abc"),
        ("show", "abc", "q0"),
        ("evaluate", "abc"),
    ],
)
def test_every_verb_names_a_job_that_does_not_exist(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)

    assert isinstance(result.exception, NotFoundError)
    assert result.exception.error_code == "unknown_job"


def test_results_go_to_standard_output_or_a_file(run: Run, engine: Engine, tmp_path: Path) -> None:
    finish(engine, make_job(engine, questions=2), completed(0), completed(1))

    assert [json.loads(line)["custom_id"] for line in run("results", "last").stdout.splitlines()] == ["q0", "q1"]
    result = run("results", "last", "--format", "csv", "-o", "out.csv")
    assert (result.stdout, result.stderr) == ("", "2 answers\n")
    assert (tmp_path / "out.csv").read_text().startswith("custom_id,question,")


def test_show_names_every_tokens_source_where_there_are_no_colours(run: Run, engine: Engine) -> None:
    finish(engine, make_job(engine, questions=2), completed(0), failed(1))

    shown = run("show", "last", "q0").stdout

    assert "target 3  passage 1  answer 1" in shown
    assert "'12':passage '13':answer '14':target" in shown
    assert "[1] 0.500  a.md  A" in shown
    assert "\x1b[" not in shown
    assert "failed [prompt_too_long]: It does not fit." in run("show", "last", "1").stdout


def test_evaluate_scores_against_the_submitted_file(run: Run, engine: Engine) -> None:
    run("submit", "q.jsonl", "--collection", "handbook")
    finish(engine, find_job(engine, "last"), completed(0, "the Paris."), completed(1, "It is Rome."))

    scores = json.loads(run("evaluate", "last", "--json").stdout)

    assert (scores["exact_match"], scores["contains"], scores["f1"]) == (0.5, 1.0, 0.75)
    assert (scores["recall"], scores["k"]) == (0.5, 1)
    assert run("evaluate", "last").stdout.splitlines() == [
        "exact match  50.0%  of 2",
        "contains     100.0%  of 2",
        "F1           75.0%  of 2",
        "recall@1     50.0%  of 2",
    ]


def test_evaluate_without_gold_says_what_is_missing(run: Run, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "bare.jsonl").write_text('{"id": "q0", "question": "Capital of France?"}\n')
    finish(engine, make_job(engine, questions=2), completed(0), completed(1))

    result = run("evaluate", "last", "--answers", "bare.jsonl")

    assert isinstance(result.exception, InputError)
    assert result.exception.error_code == "no_gold"


def test_the_choices_of_the_help_are_those_of_the_readers_and_writers() -> None:
    from producer.formats import FORMATS
    from ragspec.cli.jobs import FILE_FORMATS
    from ragspec.cli.results import EXPORT_FORMATS
    from ragspec.jobs import export

    assert (FILE_FORMATS, EXPORT_FORMATS) == (FORMATS, export.EXPORT_FORMATS)
