"""Cancelling a job."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Engine, func, select, update

from ragspec.errors import ConflictError, NotFoundError
from ragspec.jobs.closing import close_if_over
from ragspec.jobs.fence import lock_job
from ragspec.jobs.tables import FINISHED, Job, JobState


def cancel_job(engine: Engine, job_id: UUID) -> JobState:
    """Ask a job to stop; returns its state now: `cancelled`, or `cancelling` while claims are alive.

    Nothing new is claimed from here on; claims hear of it at their next beat. Answers so far are kept. Submitting the
    same file again makes a new job. Cancelling twice changes nothing.

    Raises:
        NotFoundError: there is no such job (`unknown_job`).
        ConflictError: it is finished (`job_finished`).
    """
    with engine.begin() as connection:
        state = lock_job(connection, job_id)
        if state is None:
            raise NotFoundError(f"There is no job {job_id}.", "`ragspec jobs` lists them.", code="unknown_job")
        if state in FINISHED:
            raise ConflictError(f"Job {job_id} is {state} already.", code="job_finished")
        if state != "cancelling":
            connection.execute(
                update(Job)
                .where(Job.id == job_id)
                .values(state="cancelling", cancel_requested_at=func.clock_timestamp(), resumable=False)
            )
        close_if_over(connection, job_id)
        return connection.execute(select(Job.state).where(Job.id == job_id)).scalar_one()
