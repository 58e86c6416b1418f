"""The fence: what makes a write of a claim valid, as conditions that every statement can carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, and_, func, select

from ragspec.jobs.tables import Job, JobState, Shard


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to answer one shard.

    Attributes:
        attempt: the shard's claim count when this one was made; the fence.
        worker: who holds it, for people.
    """

    job_id: UUID
    shard_no: int
    attempt: int
    worker: str


def lock_job(connection: Connection, job_id: UUID) -> JobState | None:
    """Lock a job's row until the transaction ends, against all that claim, close, cancel or sweep it; its state.

    None where there is no such job. New rows may still refer to it.
    """
    return connection.execute(
        select(Job.state).where(Job.id == job_id).with_for_update(key_share=True)
    ).scalar_one_or_none()


def held_by(claim: Claim) -> Any:
    """The condition that `claim` still holds its shard."""
    return and_(of(claim), Shard.attempt == claim.attempt, Shard.state == "running")


def stale(stale_after: float) -> Any:
    """The condition that a running shard has been silent for longer than `stale_after` seconds."""
    return Shard.heartbeat_at < ago(stale_after)


def ago(seconds: float) -> Any:
    """The moment `seconds` before now, by the database server's clock."""
    return func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, seconds)


def hold(connection: Connection, claim: Claim) -> range | None:
    """Lock the claim's shard until the transaction ends and return the `idx` it covers; None if it is lost."""
    bounds = connection.execute(
        select(Shard.start_idx, Shard.end_idx).where(held_by(claim)).with_for_update()
    ).one_or_none()
    return range(*bounds) if bounds else None


def of(claim: Claim) -> Any:
    """The condition that picks the claim's shard."""
    return and_(Shard.job_id == claim.job_id, Shard.shard_no == claim.shard_no)
