"""The sweep, on a real PostgreSQL: what died goes on, what got lost is sent again, what is over is closed."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from sqlalchemy import Engine, select

from ragspec.jobs.answers import record_answers
from ragspec.jobs.cancel import cancel_job
from ragspec.jobs.claims import beat, claim_shard, finish_shard, release
from ragspec.jobs.message import ShardMessage
from ragspec.jobs.status import job_status
from ragspec.jobs.sweep import sweep
from ragspec.jobs.tables import AnswerRow
from tests.integration.jobs.worlds import (
    MAX_ATTEMPTS,
    STALE_AFTER,
    age_messages,
    answer_texts,
    claim,
    completed,
    make_job,
    shard_row,
    silence,
)

pytestmark = pytest.mark.services


def run(engine: Engine, waiting: Mapping[str, int] | None = None) -> list[ShardMessage]:
    return sweep(engine, stale_after=STALE_AFTER, max_attempts=MAX_ATTEMPTS, waiting=waiting or {}, lost_after=30)


def test_a_silent_shard_is_sent_again_at_once_and_its_worker_has_lost_it(engine: Engine) -> None:
    job_id = make_job(engine, questions=4, shard_size=2)
    dead, alive = claim(engine, job_id, 0), claim(engine, job_id, 1)
    silence(engine, dead)

    assert run(engine) == [ShardMessage(job_id, 0, "bulk", 2)]

    assert (beat(engine, dead), beat(engine, alive)) == ("lost", "ok")
    assert run(engine) == []


def test_a_shard_handed_back_is_sent_again_at_once(engine: Engine) -> None:
    job_id = make_job(engine, questions=2, shard_size=2)
    release(engine, claim(engine, job_id))

    assert run(engine) == [ShardMessage(job_id, 0, "bulk", 2)]


def test_a_shard_whose_message_was_handed_back_too_is_not_sent_twice(engine: Engine) -> None:
    """Not even while some node has that message in its hands, so that the queue seems to lack it."""
    job_id = make_job(engine, questions=2, shard_size=2)
    release(engine, claim(engine, job_id), counts=True, resent=True)

    assert run(engine) == []

    age_messages(engine, job_id)
    assert run(engine) == [ShardMessage(job_id, 0, "bulk", 2)]


def test_a_fresh_message_is_not_taken_for_lost(engine: Engine) -> None:
    make_job(engine)

    assert run(engine, {"bulk": 0}) == []


def test_after_a_flush_every_overdue_shard_is_sent_once(engine: Engine) -> None:
    job_id = make_job(engine, questions=6, shard_size=2, queue="interactive")
    age_messages(engine, job_id)

    assert [message.shard_no for message in run(engine)] == [0, 1, 2]
    assert run(engine) == []


def test_a_backlog_that_waits_for_long_is_not_sent_again(engine: Engine) -> None:
    """However late the workers are, a queue that holds a message for each queued shard has lost none."""
    job_id = make_job(engine, questions=6, shard_size=1)
    age_messages(engine, job_id)

    assert run(engine, {"bulk": 6}) == []
    assert run(engine, {"bulk": 60}) == []


def test_no_more_is_sent_than_the_queue_lacks_and_the_oldest_first(engine: Engine) -> None:
    old, new = make_job(engine, questions=4, shard_size=2), make_job(engine, questions=4, shard_size=2)
    age_messages(engine, new)
    age_messages(engine, old)
    age_messages(engine, old)

    assert [message.job_id for message in run(engine, {"bulk": 3})] == [old]


def test_two_sweeps_at_once_send_each_shard_once(engine: Engine) -> None:
    job_id = make_job(engine, questions=40, shard_size=1)
    age_messages(engine, job_id)

    with ThreadPoolExecutor(4) as pool:
        sent = [message.shard_no for messages in pool.map(lambda _: run(engine), range(4)) for message in messages]

    assert sorted(sent) == list(range(40))


def test_a_shard_that_keeps_dying_fails_what_it_left_unanswered_and_keeps_the_rest(engine: Engine) -> None:
    job_id = make_job(engine, questions=2, shard_size=2)
    for _ in range(MAX_ATTEMPTS):
        held = claim(engine, job_id)
        record_answers(engine, held, [completed(0)])
        silence(engine, held)

    assert run(engine) == []

    status = job_status(engine, job_id)
    assert (status.state, status.completed, status.failed, status.shards_done) == ("completed", 1, 1, 1)
    with engine.connect() as connection:
        row = connection.execute(select(AnswerRow.idx, AnswerRow.error_code).where(AnswerRow.status == "failed")).one()
    assert tuple(row) == (1, "too_many_attempts")
    assert record_answers(engine, held, [completed(1, "late")]) == 0
    assert answer_texts(engine, job_id) == {0: "Paris", 1: ""}


def test_a_cancelled_job_whose_worker_died_ends(engine: Engine) -> None:
    job_id = make_job(engine)
    held = claim(engine, job_id)
    assert cancel_job(engine, job_id) == "cancelling"
    run(engine)
    assert job_status(engine, job_id).state == "cancelling"

    silence(engine, held)
    assert run(engine) == []

    assert job_status(engine, job_id).state == "cancelled"


def test_the_shards_of_a_cancelled_job_are_not_sent(engine: Engine) -> None:
    job_id = make_job(engine)
    age_messages(engine, job_id)
    assert cancel_job(engine, job_id) == "cancelled"

    assert run(engine) == []


def test_a_job_left_open_by_its_last_shard_is_closed(engine: Engine) -> None:
    job_id = make_job(engine, questions=1)
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(0)])
    finish_shard(engine, held)
    reopen(engine, job_id)

    run(engine)

    assert job_status(engine, job_id).state == "completed"


def reopen(engine: Engine, job_id: UUID) -> None:
    from sqlalchemy import update

    from ragspec.jobs.tables import Job

    with engine.begin() as connection:
        connection.execute(update(Job).where(Job.id == job_id).values(state="in_progress", finished_at=None))


def test_a_swept_shard_is_claimed_and_finished_like_any_other(engine: Engine) -> None:
    job_id = make_job(engine, questions=1)
    silence(engine, claim(engine, job_id))
    (message,) = run(engine)

    claimed = claim_shard(
        engine, message.job_id, message.shard_no, "w2", stale_after=STALE_AFTER, max_attempts=MAX_ATTEMPTS
    )
    assert claimed is not None
    record_answers(engine, claimed.claim, [completed(0)])

    assert finish_shard(engine, claimed.claim)
    assert shard_row(engine, job_id).tries == 2
