"""Claims: who works on a shard, and the fence that keeps a late worker's hands off it.

A claim raises its shard's `attempt`. Every later write names the attempt it was made under and bounces when the
shard has moved on or is no longer running. Locks are taken in one order everywhere, the job's row before its
shards' rows, so that no two verbs can wait for each other. All times are the database server's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from sqlalchemy import Engine, and_, case, func, or_, select, update

from ragspec.jobs.answer import Question
from ragspec.jobs.closing import close_if_over
from ragspec.jobs.fence import Claim, held_by, lock_job, of, stale
from ragspec.jobs.options import AnswerOptions
from ragspec.jobs.tables import AnswerRow, Job, QuestionRow, Shard

__all__ = [
    "Beat",
    "Claim",
    "ClaimedShard",
    "beat",
    "claim_shard",
    "finish_shard",
    "release",
    "unanswered",
]

#: `lost`: another claim, the sweep or a retry has the shard now; stop, nothing more will be recorded.
#: `cancelled`: the job is being cancelled; stop decoding, record what is finished, `release`.
Beat = Literal["ok", "lost", "cancelled"]


@dataclass(frozen=True, slots=True)
class ClaimedShard:
    """What a worker needs to start.

    Attributes:
        claim: to be named in every write.
        options: the job's; a row's own override them (`RowOptions.merged`).
        questions: questions in this shard, answered ones included.
        questions_total: questions of the whole job.
        tries: claims of this shard that count against `max_attempts`, this one included. More than 1: an earlier one
            lost its worker or its engine, perhaps to one of these questions.
    """

    claim: Claim
    options: AnswerOptions
    questions: int
    questions_total: int
    tries: int


def claim_shard(
    engine: Engine, job_id: UUID, shard_no: int, worker: str, *, stale_after: float, max_attempts: int
) -> ClaimedShard | None:
    """Take a shard, or None where there is nothing to do.

    Nothing to do: the shard or job does not exist, the shard is done, the job is finished or being cancelled, the
    shard's tries are used up (the sweep fails what is left of it), or a live claim holds it. Hence a message that
    is delivered twice costs one query.

    Args:
        engine: the database.
        job_id: the job.
        shard_no: the shard, from 0.
        worker: a name for people, `host:pid` say.
        stale_after: seconds without a beat after which the present claim is void.
        max_attempts: tries a shard gets.
    """
    with engine.begin() as connection:
        if lock_job(connection, job_id) != "in_progress":
            return None
        free = or_(Shard.state == "queued", and_(Shard.state == "running", stale(stale_after)))
        claimed = connection.execute(
            update(Shard)
            .where(Shard.job_id == job_id, Shard.shard_no == shard_no, free, Shard.tries < max_attempts)
            .values(
                state="running",
                attempt=Shard.attempt + 1,
                tries=Shard.tries + 1,
                worker=worker,
                claimed_at=func.clock_timestamp(),
                heartbeat_at=func.clock_timestamp(),
            )
            .returning(Shard.attempt, Shard.start_idx, Shard.end_idx, Shard.tries)
        ).one_or_none()
        if claimed is None:
            return None
        job = connection.execute(select(Job.options, Job.questions_total, Job.started_at).where(Job.id == job_id)).one()
        if job.started_at is None:
            connection.execute(update(Job).where(Job.id == job_id).values(started_at=func.clock_timestamp()))
    return ClaimedShard(
        claim=Claim(job_id, shard_no, claimed.attempt, worker),
        options=AnswerOptions.model_validate(job.options),
        questions=claimed.end_idx - claimed.start_idx,
        questions_total=job.questions_total,
        tries=claimed.tries,
    )


def unanswered(engine: Engine, claim: Claim, *, after_idx: int = -1, batch: int = 64) -> list[Question]:
    """The shard's first `batch` questions behind `after_idx` that have no answer yet, in order; [] at its end.

    One short transaction; nothing stays open while the caller works on them. A caller that goes on behind the last one
    it was given skips what was answered in between, but not what was answered since its batch was read.
    """
    with engine.connect() as connection:
        # First, and not joined: with a shard's bounds as numbers, the planner reads a range of the index.
        bounds = connection.execute(select(Shard.start_idx, Shard.end_idx).where(of(claim))).one_or_none()
        if bounds is None:
            return []
        query = (
            select(QuestionRow.idx, QuestionRow.custom_id, QuestionRow.text, QuestionRow.row_options)
            .outerjoin(AnswerRow, and_(AnswerRow.job_id == QuestionRow.job_id, AnswerRow.idx == QuestionRow.idx))
            .where(
                QuestionRow.job_id == claim.job_id,
                QuestionRow.idx >= max(bounds.start_idx, after_idx + 1),
                QuestionRow.idx < bounds.end_idx,
                AnswerRow.idx.is_(None),
            )
            .order_by(QuestionRow.idx)
            .limit(batch)
        )
        return [Question(*row) for row in connection.execute(query)]


def beat(engine: Engine, claim: Claim) -> Beat:
    """Say that the claim is alive, and hear whether to go on.

    A claim that was silent for longer than `stale_after` may have been given away; then it is `lost` for good.
    """
    with engine.begin() as connection:
        job_state = connection.execute(
            update(Shard)
            .where(held_by(claim), Job.id == Shard.job_id)
            .values(heartbeat_at=func.clock_timestamp())
            .returning(Job.state)
        ).scalar_one_or_none()
    if job_state is None:
        return "lost"
    return "ok" if job_state == "in_progress" else "cancelled"


def release(engine: Engine, claim: Claim, *, counts: bool = False, resent: bool = False) -> bool:
    """Hand the shard back at once: a message or the next sweep takes it from here. False if the claim was lost.

    Args:
        engine: the database.
        claim: whose shard.
        counts: the try counts against `max_attempts`: True where the engine died under it, since one of the shard's
            own questions may have killed it; False for a shutdown or a cancel.
        resent: the caller sends the shard's message itself, now. Where not, no message is known to be under way, and
            the next sweep sends one.
    """
    with engine.begin() as connection:
        lock_job(connection, claim.job_id)
        released = connection.execute(
            update(Shard)
            .where(held_by(claim))
            .values(
                state="queued",
                tries=Shard.tries if counts else Shard.tries - 1,
                worker=None,
                enqueued_at=func.clock_timestamp() if resent else None,
            )
        ).rowcount
        if released:
            close_if_over(connection, claim.job_id)
    return bool(released)


def finish_shard(engine: Engine, claim: Claim) -> bool:
    """Mark the shard done, and close its job if it was the last; True if this call closed the job.

    Calling it again changes nothing. A lost claim changes nothing. Neither does a shard with questions left
    unanswered: it goes back to the queue (as `release` does), for done means answered.
    """
    with engine.begin() as connection:
        lock_job(connection, claim.job_id)
        answered = Shard.completed + Shard.failed == Shard.end_idx - Shard.start_idx
        finished = connection.execute(
            update(Shard)
            .where(held_by(claim))
            .values(
                state=case((answered, "done"), else_="queued"),
                finished_at=case((answered, func.clock_timestamp()), else_=None),
                enqueued_at=case((answered, Shard.enqueued_at), else_=None),
            )
        ).rowcount
        return bool(finished) and close_if_over(connection, claim.job_id)
