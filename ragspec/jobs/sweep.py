"""The sweep: what makes PostgreSQL the truth and the broker a mere wake-up call."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from sqlalchemy import Connection, Engine, and_, func, literal, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert

from ragspec.jobs.answers import count_answers
from ragspec.jobs.closing import close_if_over, unfinished_jobs
from ragspec.jobs.fence import ago, lock_job, stale
from ragspec.jobs.message import ShardMessage
from ragspec.jobs.options import Queue
from ragspec.jobs.tables import AnswerRow, Job, QuestionRow, Shard

#: Seconds a message may take from being recorded to being claimed or seen waiting, before it can count as lost.
LOST_AFTER_S = 30.0
QUEUES: tuple[Queue, ...] = ("interactive", "bulk")


def sweep(
    engine: Engine,
    *,
    stale_after: float,
    max_attempts: int,
    waiting: Mapping[str, int],
    lost_after: float = LOST_AFTER_S,
) -> list[ShardMessage]:
    """Repair what died or got lost; returns the messages to send, already marked as sent.

    For each unfinished job: running shards without a beat go back to the queue; shards whose tries are used up are
    finished with failed answers (`too_many_attempts`); jobs with nothing left to do are closed.

    Then lost messages. There ought to be one message waiting for each queued shard, so a queue that holds fewer
    messages than there are queued shards has lost the difference, and no more than the difference is sent: however
    long no worker runs and however often this is called, a queue never grows past its queued shards (and those few
    that a node took off the queue but has not claimed). The oldest are sent first, because a queue is first in, first
    out and those behind the oldest are still in it. A shard enqueued less than `lost_after` seconds ago is left alone:
    its message may be on its way. A wrong guess costs a message that does nothing.

    Safe to run twice at once: each job is handled under its row lock, and a shard is picked by one sweep only. If the
    messages then cannot be sent, they count as lost after `lost_after` seconds.

    Args:
        engine: the database.
        stale_after: seconds of silence that void a claim.
        max_attempts: tries a shard gets.
        waiting: messages waiting in each queue, read from the broker just before (`ragspec.queue.waiting`).
        lost_after: seconds, see above.
    """
    with engine.connect() as connection:
        jobs = unfinished_jobs(connection)
    for job_id in jobs:
        with engine.begin() as connection:
            _tend(connection, job_id, stale_after, max_attempts)
    messages: list[ShardMessage] = []
    for queue in QUEUES:
        with engine.begin() as connection:
            messages += _lost(connection, queue, waiting.get(queue, 0), lost_after)
    return messages


def _tend(connection: Connection, job_id: UUID, stale_after: float, max_attempts: int) -> None:
    lock_job(connection, job_id)
    connection.execute(
        update(Shard)
        .where(Shard.job_id == job_id, Shard.state == "running", stale(stale_after))
        .values(state="queued", worker=None, enqueued_at=None)
    )
    used_up = connection.execute(
        select(Shard.shard_no, Shard.start_idx, Shard.end_idx)
        .join(Job, Job.id == Shard.job_id)
        .where(Shard.job_id == job_id, Job.state == "in_progress", Shard.state == "queued", Shard.tries >= max_attempts)
        .with_for_update(of=Shard)
    ).all()
    for shard_no, start_idx, end_idx in used_up:
        _give_up(connection, job_id, shard_no, range(start_idx, end_idx), max_attempts)
    close_if_over(connection, job_id)


def _give_up(connection: Connection, job_id: UUID, shard_no: int, shard: range, max_attempts: int) -> None:
    attempt = connection.execute(
        update(Shard)
        .where(Shard.job_id == job_id, Shard.shard_no == shard_no)
        .values(attempt=Shard.attempt + 1)
        .returning(Shard.attempt)
    ).scalar_one()
    missing = (
        select(
            QuestionRow.job_id,
            QuestionRow.idx,
            literal(attempt),
            literal("failed"),
            literal("too_many_attempts"),
            literal(f"The worker was lost {max_attempts} times while this question's shard {shard_no} was answered."),
        )
        .outerjoin(AnswerRow, and_(AnswerRow.job_id == QuestionRow.job_id, AnswerRow.idx == QuestionRow.idx))
        .where(
            QuestionRow.job_id == job_id,
            QuestionRow.idx >= shard.start,
            QuestionRow.idx < shard.stop,
            AnswerRow.idx.is_(None),
        )
    )
    columns = ["job_id", "idx", "attempt", "status", "error_code", "error_message"]
    connection.execute(insert(AnswerRow).from_select(columns, missing, include_defaults=False))
    count_answers(connection, job_id, shard_no)
    connection.execute(
        update(Shard)
        .where(Shard.job_id == job_id, Shard.shard_no == shard_no)
        .values(state="done", finished_at=func.clock_timestamp())
    )


def _lost(connection: Connection, queue: Queue, waiting: int, lost_after: float) -> list[ShardMessage]:
    of_queue = and_(Shard.job_id == Job.id, Shard.state == "queued", Job.queue == queue, Job.state == "in_progress")
    queued = connection.execute(select(func.count()).select_from(Shard).join(Job, of_queue)).scalar_one()
    if queued <= waiting:
        return []
    overdue = Shard.enqueued_at < ago(lost_after)
    picked = (
        select(Shard.job_id, Shard.shard_no)
        .join(Job, of_queue)
        .where(or_(Shard.enqueued_at.is_(None), overdue))
        .order_by(Shard.enqueued_at.nulls_first(), Job.created_at, Shard.shard_no)
        .limit(queued - waiting)
        .with_for_update(of=Shard, skip_locked=True)
        .cte("picked")
    )
    rows = connection.execute(
        update(Shard)
        .where(tuple_(Shard.job_id, Shard.shard_no).in_(select(picked.c.job_id, picked.c.shard_no)))
        .values(enqueued_at=func.clock_timestamp())
        .returning(Shard.job_id, Shard.shard_no, Shard.end_idx - Shard.start_idx)
    ).all()
    return sorted(
        (ShardMessage(job_id, shard_no, queue, questions) for job_id, shard_no, questions in rows),
        key=lambda message: (message.job_id, message.shard_no),
    )
