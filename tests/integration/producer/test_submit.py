"""Submitting files against real services: what is checked first, what is recorded, what is sent."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, func, select

import producer.submit
from producer.submit import submit
from ragspec.errors import InputError, NotFoundError, RagspecError, ServiceUnavailableError
from ragspec.jobs.intake import RowsRejectedError
from ragspec.jobs.options import AnswerOptions
from ragspec.jobs.tables import Job
from ragspec.queue import celery_app, waiting
from ragspec.settings import Settings

pytestmark = pytest.mark.services

OPTIONS = AnswerOptions(collection="handbook")


@pytest.fixture
def settings(engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings of empty services; the collection is taken for granted."""
    del engine
    monkeypatch.setattr(producer.submit, "check_collection", lambda settings, name: None)
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        yield Settings(database_url=database_url, redis_url=redis_url, shard_size=2)
        client.flushdb()


def questions(folder: Path, n: int = 5) -> str:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "question": f"What is {i}?"}) + "\n" for i in range(n)))
    return str(path)


def jobs(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(Job)).scalar_one()


def test_a_file_becomes_a_job_and_a_message_a_shard(settings: Settings, engine: Engine, tmp_path: Path) -> None:
    submitted = submit(settings, questions(tmp_path), OPTIONS)

    assert (submitted.recorded.questions, submitted.enqueued) == (5, 3)
    assert waiting(celery_app(settings))["bulk"] == 3
    with engine.connect() as connection:
        assert connection.execute(select(Job.source_name)).scalar_one() == str(tmp_path / "questions.jsonl")


def test_a_row_whose_least_length_is_above_the_jobs_greatest_is_refused(
    settings: Settings, engine: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "Who?"}\n{"question": "What?", "min_tokens": 200}\n')

    with pytest.raises(RowsRejectedError, match=r"line 2: .*min_tokens") as caught:
        submit(settings, str(path), OPTIONS)

    assert (caught.value.error_code, jobs(engine)) == ("bad_option", 0)


def test_the_priority_picks_the_queue(settings: Settings, tmp_path: Path) -> None:
    submit(settings, questions(tmp_path), OPTIONS.model_copy(update={"queue": "interactive"}), shard_size=5)

    assert waiting(celery_app(settings)) == {"bulk": 0, "interactive": 1, "ask": 0, "control": 0}


def test_submitting_again_resumes_and_sends_what_is_not_done(
    settings: Settings, engine: Engine, tmp_path: Path
) -> None:
    first = submit(settings, questions(tmp_path), OPTIONS)

    again = submit(settings, questions(tmp_path), OPTIONS)

    assert (again.recorded.job_id, again.recorded.created, again.enqueued) == (first.recorded.job_id, False, 3)
    assert jobs(engine) == 1


def test_one_bad_line_among_ten_thousand_rejects_the_file_or_is_skipped(
    settings: Settings, engine: Engine, tmp_path: Path
) -> None:
    path = questions(tmp_path, 10_000)
    with Path(path).open("a") as file:
        file.write("not json\n")

    with pytest.raises(RowsRejectedError, match="line 10001") as caught:
        submit(settings, path, OPTIONS)
    assert (caught.value.error_code, jobs(engine)) == ("invalid_json_line", 0)

    submitted = submit(settings, path, OPTIONS, on_error="skip", shard_size=5_000)
    assert (submitted.recorded.questions, submitted.recorded.row_errors, submitted.enqueued) == (10_000, 1, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"redis_url": "redis://127.0.0.1:1/0"}, "Redis"),
        ({"database_url": "postgresql://127.0.0.1:1/jobs"}, "PostgreSQL"),
    ],
)
def test_a_service_that_is_down_is_named_and_nothing_is_half_done(
    settings: Settings, engine: Engine, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ServiceUnavailableError, match=f"{named} at 127.0.0.1") as caught:
        submit(Settings(**{**settings.model_dump(), **change}), questions(tmp_path), OPTIONS)

    assert caught.value.exit_status == 69
    assert jobs(engine) == 0
    assert waiting(celery_app(settings))["bulk"] == 0


def test_redis_that_dies_after_recording_loses_nothing_and_says_so(
    settings: Settings, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: Any) -> int:
        raise ServiceUnavailableError("Redis at here does not answer.")

    monkeypatch.setattr(producer.submit, "send_shards", dead)

    with pytest.raises(ServiceUnavailableError, match=r"is recorded.*sweep"):
        submit(settings, questions(tmp_path), OPTIONS)

    assert jobs(engine) == 1


# chromadb's HTTP client leaves its connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize(
    ("name", "error", "code"),
    [("jobs-nowhere", NotFoundError, "unknown_collection"), ("x", InputError, "bad_collection_name")],
)
def test_a_collection_that_cannot_answer_is_refused_first(
    engine: Engine,
    database_url: str,
    redis_url: str,
    chroma_url: str,
    tmp_path: Path,
    name: str,
    error: type[RagspecError],
    code: str,
) -> None:
    settings = Settings(database_url=database_url, redis_url=redis_url, chroma_url=chroma_url)

    with pytest.raises(error) as caught:
        submit(settings, questions(tmp_path), AnswerOptions(collection=name))

    assert (caught.value.error_code, jobs(engine)) == (code, 0)
    del caught
    gc.collect()


def test_an_empty_file_is_refused(settings: Settings, tmp_path: Path) -> None:
    for name, content in (("a.jsonl", ""), ("b.jsonl", "\n\n"), ("c.csv", "question\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError) as caught:
            submit(settings, str(tmp_path / name), OPTIONS)
        assert caught.value.error_code == "empty_file"
