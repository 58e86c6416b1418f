"""What a tenant has under way, and what more it may have."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import BigInteger, Connection, Engine, cast, func, select

from ragspec.errors import ConflictError
from ragspec.jobs.tables import Job, Shard, TenantRow


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant has under way.

    Attributes:
        enqueued_questions: questions of its running jobs that have neither an answer nor a coded failure.
        unfinished_jobs: its jobs that are running or being cancelled.
    """

    enqueued_questions: int
    unfinished_jobs: int


class LimitReachedError(ConflictError):
    """A submission that a limit of its tenant leaves no room for; nothing was recorded.

    Args:
        limit: the limit's name, a field of `ragspec.jobs.tenant.Limits`.
        allowed: what it allows.
        remaining: how much of that is free.
        asked: how much the submission wants.
    """

    code = "limit_reached"

    def __init__(self, limit: str, allowed: int, remaining: int, asked: int) -> None:
        super().__init__(
            f"The tenant's {limit} is {allowed}, of which {remaining} remain, and this job wants {asked}.",
            "Wait until jobs are finished, or submit less.",
        )
        self.limit = limit
        self.allowed = allowed
        self.remaining = remaining
        self.asked = asked


def usage(engine: Engine, tenant_id: UUID) -> Usage:
    """What the tenant has under way, out of its unfinished jobs' shards: no answer is read."""
    with engine.connect() as connection:
        return _usage(connection, tenant_id)


def require_room(connection: Connection, tenant_id: UUID, job_id: UUID, questions: int) -> None:
    """Refuse a job that its tenant has no room for.

    The tenant's row is locked until the transaction ends, so that of two submissions the second counts the first. Call
    it once the job's row is inserted: a job's row is locked before its tenant's everywhere. A tenant without limits is
    not locked.

    Raises:
        LimitReachedError: a limit would be passed; roll back.
    """
    limits = select(TenantRow.max_enqueued_questions, TenantRow.max_concurrent_jobs).where(TenantRow.id == tenant_id)
    if not any(limit is not None for limit in connection.execute(limits).one()):
        return
    # key_share: jobs may be inserted meanwhile, which look whether the tenant exists.
    max_questions, max_jobs = connection.execute(limits.with_for_update(key_share=True)).one()
    others = _usage(connection, tenant_id, besides=job_id)
    for limit, allowed, taken, asked in (
        ("max_concurrent_jobs", max_jobs, others.unfinished_jobs, 1),
        ("max_enqueued_questions", max_questions, others.enqueued_questions, questions),
    ):
        if allowed is not None and taken + asked > allowed:
            raise LimitReachedError(limit, allowed, max(allowed - taken, 0), asked)


def _usage(connection: Connection, tenant_id: UUID, *, besides: UUID | None = None) -> Usage:
    jobs = select(Job.id, Job.state).where(
        Job.tenant_id == tenant_id, Job.state.in_(("in_progress", "finalizing", "cancelling"))
    )
    if besides is not None:
        jobs = jobs.where(Job.id != besides)
    unfinished = jobs.cte("unfinished")
    left = func.sum(Shard.end_idx - Shard.start_idx - Shard.completed - Shard.failed)
    enqueued = (
        select(func.coalesce(cast(left, BigInteger), 0))
        .join(unfinished, unfinished.c.id == Shard.job_id)
        .where(unfinished.c.state == "in_progress", Shard.state.in_(("queued", "running")))
    )
    count = select(func.count()).select_from(unfinished)
    row = connection.execute(select(enqueued.scalar_subquery(), count.scalar_subquery())).one()
    return Usage(*row)
