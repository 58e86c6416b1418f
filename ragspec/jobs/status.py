"""Where a job stands, read from its shards' counters: a query of milliseconds however many answers there are."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, ColumnElement, Engine, Float, Select, Text, cast, func, select

from ragspec.errors import InputError, NotFoundError
from ragspec.jobs.tables import FINISHED, Job, JobState, Shard


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job's progress.

    Attributes:
        job_id, state, source_name, collection, queue: what it is.
        questions: how many it has.
        completed, failed: answers so far.
        row_errors: rows of the file that were skipped.
        shards_queued, shards_running, shards_done: shards in each state.
        completion_tokens, verify_steps, draft_tokens, accepted_draft_tokens: sums over its answers.
        mean_acceptance_length: tokens per verify step over all answers; 0.0 before the first step.
        draft_acceptance_rate: accepted over drafted; 0.0 before the first draft.
        created_at, started_at, finished_at, cancel_requested_at: when; started is the first claim.
        elapsed_s: seconds since the first claim, up to the end.
        error: why it could not be run at all, if so.
    """

    job_id: UUID
    state: JobState
    source_name: str
    collection: str
    queue: str
    questions: int
    completed: int
    failed: int
    row_errors: int
    shards_queued: int
    shards_running: int
    shards_done: int
    completion_tokens: int
    verify_steps: int
    draft_tokens: int
    accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested_at: datetime | None
    elapsed_s: float
    error: str | None

    @property
    def answered(self) -> int:
        """Questions that have an answer or a coded failure."""
        return self.completed + self.failed

    @property
    def finished(self) -> bool:
        """Nothing more will happen to it unless someone asks."""
        return self.state in FINISHED

    @property
    def questions_per_second(self) -> float:
        """Answers over elapsed time; 0.0 before the first claim."""
        return self.answered / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """The status as JSON values; timestamps are ISO 8601."""
        values = {
            name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(self).items()
        }
        return {**values, "job_id": str(self.job_id), "questions_per_second": round(self.questions_per_second, 3)}


def job_status(engine: Engine, job_id: UUID) -> JobStatus:
    """The job's progress.

    Raises:
        NotFoundError: there is no such job (`unknown_job`).
    """
    with engine.connect() as connection:
        row = connection.execute(_statuses().where(Job.id == job_id)).one_or_none()
    if row is None:
        raise _unknown(str(job_id))
    return JobStatus(*row)


def list_jobs(engine: Engine, *, unfinished: bool = False, limit: int | None = None) -> list[JobStatus]:
    """Jobs, newest first."""
    chosen = select(Job.id).order_by(Job.created_at.desc()).limit(limit)
    if unfinished:
        chosen = chosen.where(Job.state.not_in(FINISHED))
    # Chosen first, so that only their shards are summed up.
    query = _statuses().where(Job.id.in_(chosen)).order_by(Job.created_at.desc())
    with engine.connect() as connection:
        return [JobStatus(*row) for row in connection.execute(query)]


def find_job(engine: Engine, text: str) -> UUID:
    """The job that `text` names: its id, a prefix that only one job has, or `last`, the newest.

    Raises:
        NotFoundError: no job is named so (`unknown_job`).
        InputError: several are (`ambiguous_job`).
    """
    query = select(Job.id).order_by(Job.created_at.desc()).limit(2)
    text = text.strip().lower()
    if text != "last":
        if not re.fullmatch(r"[0-9a-f][0-9a-f-]*", text):
            raise _unknown(text)
        query = query.where(cast(Job.id, Text).startswith(text))
    with engine.connect() as connection:
        found = list(connection.scalars(query))
    if not found:
        raise _unknown(text)
    if len(found) > 1 and text != "last":
        raise InputError(f"Several jobs begin with {text}.", "Write more of the id.", code="ambiguous_job")
    return found[0]


def _unknown(text: str) -> NotFoundError:
    return NotFoundError(f"There is no job {text}.", "`ragspec jobs` lists them.", code="unknown_job")


def _statuses() -> Select[*tuple[Any, ...]]:
    end = func.coalesce(Job.finished_at, func.clock_timestamp())
    elapsed = end - func.coalesce(Job.started_at, end)
    return (
        select(
            Job.id,
            Job.state,
            Job.source_name,
            Job.collection,
            Job.queue,
            Job.questions_total,
            _total(Shard.completed),
            _total(Shard.failed),
            Job.row_errors,
            *(func.count().filter(Shard.state == state) for state in ("queued", "running", "done")),
            _total(Shard.completion_tokens),
            _total(Shard.verify_steps),
            _total(Shard.draft_tokens),
            _total(Shard.accepted_draft_tokens),
            _ratio(Shard.step_tokens, Shard.verify_steps),
            _ratio(Shard.accepted_draft_tokens, Shard.draft_tokens),
            Job.created_at,
            Job.started_at,
            Job.finished_at,
            Job.cancel_requested_at,
            cast(func.extract("epoch", elapsed), Float),
            Job.error,
        )
        .outerjoin(Shard, Shard.job_id == Job.id)
        .group_by(Job.id)
    )


def _total(counter: Any) -> ColumnElement[int]:
    return cast(func.coalesce(func.sum(counter), 0), BigInteger)


def _ratio(part: Any, whole: Any) -> ColumnElement[float]:
    return func.coalesce(cast(func.sum(part), Float) / func.nullif(func.sum(whole), 0), 0.0)
