"""Running a job's failed rows again."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection, Engine, and_, delete, exists, select, update

from ragspec.errors import ConflictError, NotFoundError
from ragspec.jobs.answers import count_answers
from ragspec.jobs.fence import lock_job
from ragspec.jobs.tables import AnswerRow, Job, Shard


def retry_failed(engine: Engine, job_id: UUID) -> int:
    """Forget a job's failed answers and reopen their shards and the job; returns how many rows will run again.

    The caller sends `intake.queued_shards`. Completed answers stay untouched. A shard that a worker has in hand
    keeps its claim: what it then leaves unanswered sends it back to the queue when it ends.

    Raises:
        NotFoundError: there is no such job (`unknown_job`).
        ConflictError: it was cancelled (`job_cancelled`).
    """
    with engine.begin() as connection:
        state = lock_job(connection, job_id)
        if state is None:
            raise NotFoundError(f"There is no job {job_id}.", "`ragspec jobs` lists them.", code="unknown_job")
        if state in {"cancelling", "cancelled"}:
            raise ConflictError(f"Job {job_id} is {state}.", "Submit its file again.", code="job_cancelled")
        shards = _shards_with_failures(connection, job_id)
        forgotten = connection.execute(
            delete(AnswerRow).where(AnswerRow.job_id == job_id, AnswerRow.status == "failed")
        ).rowcount
        if forgotten:
            _reopen(connection, job_id, shards)
    return forgotten


def _shards_with_failures(connection: Connection, job_id: UUID) -> list[int]:
    failure = exists().where(
        and_(
            AnswerRow.job_id == Shard.job_id,
            AnswerRow.idx >= Shard.start_idx,
            AnswerRow.idx < Shard.end_idx,
            AnswerRow.status == "failed",
        )
    )
    query = select(Shard.shard_no).where(Shard.job_id == job_id, failure).order_by(Shard.shard_no).with_for_update()
    return list(connection.scalars(query))


def _reopen(connection: Connection, job_id: UUID, shards: list[int]) -> None:
    connection.execute(
        update(Shard)
        .where(Shard.job_id == job_id, Shard.shard_no.in_(shards), Shard.state == "done")
        .values(state="queued", tries=0, worker=None, finished_at=None, enqueued_at=None)
    )
    for shard_no in shards:
        count_answers(connection, job_id, shard_no)
    connection.execute(update(Job).where(Job.id == job_id).values(state="in_progress", finished_at=None, error=None))
