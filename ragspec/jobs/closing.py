"""The end of a job."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection, exists, func, select, update

from ragspec.jobs.tables import Job, Shard


def close_if_over(connection: Connection, job_id: UUID) -> bool:
    """Close the job if nothing is left to do; True if this call closed it. The caller holds the job's row lock.

    Over is: every shard done (`completed`, whatever number of its answers failed), or being cancelled and no claim
    left (`cancelled`, or `completed` where the last answer came before the cancel).
    """
    open_shard = exists().where(Shard.job_id == Job.id, Shard.state != "done")
    running_shard = exists().where(Shard.job_id == Job.id, Shard.state == "running")
    completed = connection.execute(
        update(Job)
        .where(Job.id == job_id, Job.state.in_(("in_progress", "cancelling")), ~open_shard)
        .values(state="completed", finished_at=func.clock_timestamp())
    ).rowcount
    if completed:
        return True
    cancelled = connection.execute(
        update(Job)
        .where(Job.id == job_id, Job.state == "cancelling", ~running_shard)
        .values(state="cancelled", finished_at=func.clock_timestamp(), resumable=False)
    ).rowcount
    return bool(cancelled)


def unfinished_jobs(connection: Connection) -> list[UUID]:
    """Jobs that are not finished, oldest first."""
    query = select(Job.id).where(Job.state.in_(("in_progress", "cancelling"))).order_by(Job.created_at)
    return list(connection.scalars(query))
