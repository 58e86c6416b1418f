"""Claims and the fence, on a real PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

import pytest
from sqlalchemy import Engine, select, text, update

from ragspec.jobs.answer import Question
from ragspec.jobs.answers import record_answers
from ragspec.jobs.claims import Claim, beat, claim_shard, finish_shard, release, unanswered
from ragspec.jobs.status import job_status
from ragspec.jobs.tables import AnswerRow, Job
from tests.integration.jobs.worlds import (
    MAX_ATTEMPTS,
    RECORD,
    STALE_AFTER,
    answer_texts,
    claim,
    completed,
    failed,
    make_job,
    shard_row,
    silence,
)

pytestmark = pytest.mark.services


def try_claim(engine: Engine, job_id: object, shard_no: int = 0, worker: str = "w2") -> object:
    return claim_shard(engine, job_id, shard_no, worker, stale_after=STALE_AFTER, max_attempts=MAX_ATTEMPTS)


def test_a_claim_brings_the_options_and_sizes_and_raises_the_attempt(engine: Engine) -> None:
    job_id = make_job(engine, questions=3, shard_size=2)

    claimed = claim_shard(engine, job_id, 1, "host:1", stale_after=STALE_AFTER, max_attempts=MAX_ATTEMPTS)

    assert claimed is not None
    assert Claim(job_id, 1, 1, "host:1") == claimed.claim
    assert (claimed.questions, claimed.questions_total, claimed.options.collection) == (1, 3, "handbook")
    assert job_status(engine, job_id).started_at is not None


def test_of_many_workers_that_claim_at_once_one_gets_the_shard(engine: Engine) -> None:
    job_id = make_job(engine)
    start = Barrier(4)

    def race(worker: str) -> object:
        start.wait()
        return try_claim(engine, job_id, worker=worker)

    with ThreadPoolExecutor(4) as pool:
        claims = list(pool.map(race, "abcd"))

    assert [found for found in claims if found is None] == [None, None, None]
    assert shard_row(engine, job_id).attempt == 1


def test_a_live_claim_is_not_taken_over_and_a_silent_one_is(engine: Engine) -> None:
    job_id = make_job(engine)
    first = claim(engine, job_id)

    assert try_claim(engine, job_id) is None
    silence(engine, first)

    assert claim(engine, job_id, worker="w2").attempt == 2
    assert beat(engine, first) == "lost"


def test_there_is_nothing_to_claim_of_a_shard_that_is_done_or_does_not_exist(engine: Engine) -> None:
    job_id = make_job(engine)
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(0), completed(1)])
    finish_shard(engine, held)

    assert try_claim(engine, job_id) is None
    assert try_claim(engine, job_id, shard_no=9) is None
    assert try_claim(engine, uuid4()) is None


def test_a_shard_whose_tries_are_used_up_is_left_to_the_sweep(engine: Engine) -> None:
    job_id = make_job(engine)
    for _ in range(MAX_ATTEMPTS):
        silence(engine, claim(engine, job_id))

    assert try_claim(engine, job_id) is None


def test_handing_back_costs_no_try_unless_the_engine_died(engine: Engine) -> None:
    job_id = make_job(engine)
    for _ in range(MAX_ATTEMPTS + 1):
        assert release(engine, claim(engine, job_id))
    assert shard_row(engine, job_id).tries == 0

    for tries in range(1, MAX_ATTEMPTS + 1):
        claimed = try_claim(engine, job_id)
        assert claimed is not None
        assert claimed.tries == tries
        assert release(engine, claimed.claim, counts=True)

    assert try_claim(engine, job_id) is None


def test_a_late_write_bounces_when_the_shard_moved_on(engine: Engine) -> None:
    job_id = make_job(engine)
    late = claim(engine, job_id)
    silence(engine, late)
    present = claim(engine, job_id, worker="w2")
    assert record_answers(engine, present, [completed(0, "present")]) == 1

    assert record_answers(engine, late, [completed(0, "late"), completed(1, "late")]) == 0
    assert not release(engine, late)
    assert not finish_shard(engine, late)

    assert answer_texts(engine, job_id) == {0: "present"}


def test_a_write_after_handing_back_bounces(engine: Engine) -> None:
    job_id = make_job(engine)
    held = claim(engine, job_id)
    release(engine, held)

    assert record_answers(engine, held, [completed(0)]) == 0


def test_a_write_waits_for_a_takeover_in_progress_and_then_bounces(engine: Engine) -> None:
    """The fence is read under the shard's lock: there is no moment between reading it and writing."""
    job_id = make_job(engine)
    late = claim(engine, job_id)
    with ThreadPoolExecutor(1) as pool, engine.begin() as takeover:
        takeover.execute(text("UPDATE shards SET attempt = attempt + 1 WHERE job_id = :job"), {"job": job_id})
        write = pool.submit(record_answers, engine, late, [completed(0)])
        with engine.connect() as watcher:
            waiting = text(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            while not watcher.execute(waiting).scalar_one():
                watcher.rollback()
        takeover.commit()
        assert write.result() == 0

    assert answer_texts(engine, job_id) == {}


def test_a_completed_answer_is_never_replaced_by_another_attempt_but_a_failed_one_is(engine: Engine) -> None:
    job_id = make_job(engine)
    first = claim(engine, job_id)
    record_answers(engine, first, [completed(0, "first"), failed(1)])
    release(engine, first)
    second = claim(engine, job_id)

    assert record_answers(engine, second, [completed(0, "second"), completed(1, "second")]) == 1

    assert answer_texts(engine, job_id) == {0: "first", 1: "second"}
    assert (shard_row(engine, job_id).completed, shard_row(engine, job_id).failed) == (2, 0)


def test_writing_the_same_answers_twice_changes_no_counter(engine: Engine) -> None:
    job_id = make_job(engine)
    held = claim(engine, job_id)

    for _ in range(2):
        assert record_answers(engine, held, [completed(0), failed(1)]) == 2

    row = shard_row(engine, job_id)
    assert (
        row.completed,
        row.failed,
        row.completion_tokens,
        row.step_tokens,
        row.verify_steps,
        row.draft_tokens,
        row.accepted_draft_tokens,
    ) == (1, 1, 5, 4, 2, 3, 2)


def test_every_field_of_an_answer_arrives(engine: Engine) -> None:
    job_id = make_job(engine)
    sent = completed(0)
    record_answers(engine, claim(engine, job_id), [sent])

    with engine.connect() as connection:
        row = connection.execute(select(*AnswerRow.__table__.columns)).mappings().one()

    assert {name: getattr(sent, name) for name in sent.__slots__} == {name: row[name] for name in sent.__slots__}
    assert list(RECORD.token_ids) == row["token_ids"]


def test_text_that_postgresql_cannot_hold_does_not_cost_the_batch(engine: Engine) -> None:
    job_id = make_job(engine)
    odd = completed(0, "nul \0 and lone \ud800")
    odd.passages[0].update(text="\0", score=float("nan"))

    assert record_answers(engine, claim(engine, job_id), [odd, completed(1)]) == 2

    assert answer_texts(engine, job_id)[0] == "nul \N{REPLACEMENT CHARACTER} and lone ?"


def test_an_answer_outside_the_shard_is_a_programming_error(engine: Engine) -> None:
    job_id = make_job(engine)

    with pytest.raises(ValueError, match="outside shard 0"):
        record_answers(engine, claim(engine, job_id), [completed(2)])


def test_unanswered_gives_only_what_has_no_answer_in_order_and_batches(engine: Engine) -> None:
    job_id = make_job(engine, questions=7, shard_size=5)
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(1), failed(3)])

    first = unanswered(engine, held, batch=2)
    rest = unanswered(engine, held, after_idx=first[-1].idx, batch=2)

    assert [[question.idx for question in batch] for batch in (first, rest)] == [[0, 2], [4]]
    assert unanswered(engine, held, after_idx=4) == []
    assert [question.idx for question in unanswered(engine, claim(engine, job_id, 1))] == [5, 6]
    assert Question(0, "q0", "question 0?", {}) == first[0]


def test_the_last_finished_shard_closes_the_job_once(engine: Engine) -> None:
    job_id = make_job(engine, questions=3, shard_size=2)
    first, second = claim(engine, job_id, 0), claim(engine, job_id, 1)
    record_answers(engine, first, [completed(0), failed(1)])
    record_answers(engine, second, [failed(2)])

    assert [finish_shard(engine, held) for held in (first, second, second)] == [False, True, False]

    status = job_status(engine, job_id)
    assert (status.state, status.completed, status.failed) == ("completed", 1, 2)


def test_shards_that_finish_at_once_close_the_job_exactly_once(engine: Engine) -> None:
    job_id = make_job(engine, questions=4, shard_size=1)
    held = [claim(engine, job_id, n) for n in range(4)]
    for n, one in enumerate(held):
        record_answers(engine, one, [completed(n)])
    start = Barrier(4)

    def finish(one: Claim) -> bool:
        start.wait()
        return finish_shard(engine, one)

    with ThreadPoolExecutor(4) as pool:
        closed = list(pool.map(finish, held))

    assert sorted(closed) == [False, False, False, True]
    assert job_status(engine, job_id).state == "completed"


def test_a_shard_with_questions_left_is_not_done_but_queued_again(engine: Engine) -> None:
    job_id = make_job(engine, questions=2, shard_size=2)
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(0)])

    assert not finish_shard(engine, held)

    row = shard_row(engine, job_id)
    assert (row.state, row.enqueued_at) == ("queued", None)


def test_a_beat_hears_of_a_cancel_and_the_job_ends_when_its_last_claim_is_handed_back(engine: Engine) -> None:
    job_id = make_job(engine)
    held = claim(engine, job_id)
    assert beat(engine, held) == "ok"
    with engine.begin() as connection:
        connection.execute(update(Job).values(state="cancelling"))

    assert beat(engine, held) == "cancelled"
    assert record_answers(engine, held, [completed(0)]) == 1
    assert try_claim(engine, job_id, shard_no=1) is None
    release(engine, held)

    status = job_status(engine, job_id)
    assert (status.state, status.completed) == ("cancelled", 1)
