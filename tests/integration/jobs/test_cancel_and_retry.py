"""Cancelling and retrying, on a real PostgreSQL."""

from __future__ import annotations

from uuid import uuid4

import pytest
from sqlalchemy import Engine

from ragspec.errors import ConflictError, NotFoundError
from ragspec.jobs.answers import record_answers
from ragspec.jobs.cancel import cancel_job
from ragspec.jobs.claims import finish_shard, unanswered
from ragspec.jobs.intake import queued_shards
from ragspec.jobs.retry import retry_failed
from ragspec.jobs.status import job_status
from tests.integration.jobs.worlds import answer_texts, claim, completed, failed, make_job, shard_row

pytestmark = pytest.mark.services


def test_cancelling_keeps_answers_and_waits_for_live_claims(engine: Engine) -> None:
    job_id = make_job(engine)
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(0), completed(1)])

    assert cancel_job(engine, job_id) == "cancelling"
    assert cancel_job(engine, job_id) == "cancelling"
    assert finish_shard(engine, held)

    status = job_status(engine, job_id)
    assert (status.state, status.completed, status.finished) == ("cancelled", 2, True)


def test_a_finished_job_cannot_be_cancelled(engine: Engine) -> None:
    job_id = make_job(engine, questions=1)
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(0)])
    finish_shard(engine, held)

    with pytest.raises(ConflictError, match="is completed already"):
        cancel_job(engine, job_id)


def test_a_job_that_does_not_exist_can_be_neither_cancelled_nor_retried(engine: Engine) -> None:
    for verb in (cancel_job, retry_failed):
        with pytest.raises(NotFoundError):
            verb(engine, uuid4())


def test_retry_runs_the_failed_rows_and_only_them(engine: Engine) -> None:
    job_id = make_job(engine, questions=4, shard_size=2)
    for shard_no, answers in enumerate(([completed(0), completed(1)], [failed(2), completed(3)])):
        held = claim(engine, job_id, shard_no)
        record_answers(engine, held, answers)
        finish_shard(engine, held)

    assert retry_failed(engine, job_id) == 1

    status = job_status(engine, job_id)
    assert (status.state, status.completed, status.failed) == ("in_progress", 3, 0)
    assert [message.shard_no for message in queued_shards(engine, job_id)] == [1]
    again = claim(engine, job_id, 1)
    assert [question.idx for question in unanswered(engine, again)] == [2]
    record_answers(engine, again, [completed(2, "now")])
    assert finish_shard(engine, again)
    assert answer_texts(engine, job_id) == {0: "Paris", 1: "Paris", 2: "now", 3: "Paris"}


def test_retry_of_a_job_without_failures_changes_nothing(engine: Engine) -> None:
    job_id = make_job(engine, questions=1)
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(0)])
    finish_shard(engine, held)

    assert retry_failed(engine, job_id) == 0
    assert job_status(engine, job_id).state == "completed"


def test_retry_leaves_a_running_shard_its_claim_and_the_shard_comes_back(engine: Engine) -> None:
    job_id = make_job(engine, questions=2, shard_size=2)
    held = claim(engine, job_id)
    record_answers(engine, held, [failed(0), completed(1)])

    assert retry_failed(engine, job_id) == 1
    assert not finish_shard(engine, held)

    assert shard_row(engine, job_id).state == "queued"


def test_a_cancelled_job_is_not_retried(engine: Engine) -> None:
    job_id = make_job(engine)
    cancel_job(engine, job_id)

    with pytest.raises(ConflictError):
        retry_failed(engine, job_id)
