"""The tables. docs/reference/tables.md explains them for those who query; the views are in `ragspec.jobs.views`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    func,
)
from sqlalchemy import text as sql
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION, JSONB, REAL, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ragspec.jobs.options import Queue
from ragspec.jobs.tenant import DEFAULT_TENANT

#: OpenAI Batch's names. `validating` and `finalizing` lie inside one transaction here and are never seen from outside.
JobState = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
FINISHED: tuple[JobState, ...] = ("completed", "failed", "expired", "cancelled")
ShardState = Literal["queued", "running", "done"]

_JOB_STATES = (
    "state IN ('validating', 'in_progress', 'finalizing', 'completed', 'failed', 'expired', 'cancelling', 'cancelled')"
)
_UNFINISHED = "state IN ('in_progress', 'finalizing', 'cancelling')"


class Base(DeclarativeBase):
    """Every constraint has a predictable name, so that a migration can drop it on any database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads this name from the class
        str: Text(),
        datetime: TIMESTAMP(timezone=True),
        float: DOUBLE_PRECISION(),
        dict[str, Any]: JSONB(),
        list[dict[str, Any]]: JSONB(),
        JobState: Text(),
        Queue: Text(),
        ShardState: Text(),
    }


class TenantRow(Base):
    """Who jobs and collections belong to; `ragspec.jobs.tenant.Tenant` is how it travels. A null limit is none."""

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint(
            "requests_per_minute >= 0 AND max_enqueued_questions >= 0 AND max_concurrent_jobs >= 0",
            name="limits_positive",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    requests_per_minute: Mapped[int | None]
    max_enqueued_questions: Mapped[int | None]
    max_concurrent_jobs: Mapped[int | None]


class ApiKeyRow(Base):
    """A key of a tenant, of which only the SHA-256 is kept."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("length(key_hash) = 32", name="hash_is_sha256"),
        # A revoked key's name is free again: keys are replaced under the name that they had.
        Index("ix_api_keys_name_in_use", "tenant_id", "name", unique=True, postgresql_where=sql("revoked_at IS NULL")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    prefix: Mapped[str]
    key_hash: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Job(Base):
    """One submitted file: its options and where it stands."""

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(_JOB_STATES, name="state_known"),
        CheckConstraint("queue IN ('bulk', 'interactive')", name="queue_known"),
        CheckConstraint("questions_total >= 0 AND shard_size > 0 AND row_errors >= 0", name="counts_positive"),
        CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('completed', 'failed', 'expired', 'cancelled'))",
            name="finished_has_time",
        ),
        # One job a tenant, file and options, unless `--new` or a cancel took the older one out of the way.
        Index(
            "ix_jobs_fingerprint_resumable", "tenant_id", "fingerprint", unique=True, postgresql_where=sql("resumable")
        ),
        Index("ix_jobs_created_at", "created_at"),
        Index("ix_jobs_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_jobs_unfinished", "state", postgresql_where=sql(_UNFINISHED)),
        Index("ix_jobs_unfinished_of_tenant", "tenant_id", postgresql_where=sql(_UNFINISHED)),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    state: Mapped[JobState]
    collection: Mapped[str]
    source_name: Mapped[str]
    fingerprint: Mapped[str]
    resumable: Mapped[bool]
    options: Mapped[dict[str, Any]]
    queue: Mapped[Queue]
    questions_total: Mapped[int]
    shard_size: Mapped[int]
    row_errors: Mapped[int] = mapped_column(server_default=sql("0"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    error: Mapped[str | None]
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), server_default=sql(f"'{DEFAULT_TENANT}'::uuid"))


class QuestionRow(Base):
    """One question of a job; `ragspec.jobs.answer.Question` is how it travels."""

    __tablename__ = "questions"
    __table_args__ = (UniqueConstraint("job_id", "custom_id"),)

    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    idx: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    custom_id: Mapped[str]
    text: Mapped[str]
    row_options: Mapped[dict[str, Any]] = mapped_column(server_default=sql("'{}'"))


class Shard(Base):
    """The questions [start_idx, end_idx) of a job: what one queue message stands for.

    `attempt` counts claims and fences their writes. `tries` counts the claims that were neither handed back nor
    finished: what `max_attempts` is held against. `enqueued_at` is null while no message is known to be under way.
    The counters are kept up in the transaction that writes the answers, so that status never counts answers.
    """

    __tablename__ = "shards"
    __table_args__ = (
        CheckConstraint("state IN ('queued', 'running', 'done')", name="state_known"),
        CheckConstraint("start_idx >= 0 AND end_idx > start_idx", name="range_positive"),
        CheckConstraint("completed + failed <= end_idx - start_idx", name="counters_within_range"),
        CheckConstraint("state <> 'done' OR completed + failed = end_idx - start_idx", name="done_means_answered"),
        CheckConstraint("state <> 'running' OR heartbeat_at IS NOT NULL", name="running_has_heartbeat"),
        Index("ix_shards_open", "state", "job_id", postgresql_where=sql("state <> 'done'")),
    )

    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    shard_no: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    start_idx: Mapped[int]
    end_idx: Mapped[int]
    state: Mapped[ShardState] = mapped_column(server_default=sql("'queued'"))
    attempt: Mapped[int] = mapped_column(server_default=sql("0"))
    tries: Mapped[int] = mapped_column(server_default=sql("0"))
    worker: Mapped[str | None]
    enqueued_at: Mapped[datetime | None]
    claimed_at: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    completed: Mapped[int] = mapped_column(server_default=sql("0"))
    failed: Mapped[int] = mapped_column(server_default=sql("0"))
    completion_tokens: Mapped[int] = mapped_column(BigInteger, server_default=sql("0"))
    #: Tokens that verify steps emitted: all but each answer's first. Over verify_steps: the mean acceptance length.
    step_tokens: Mapped[int] = mapped_column(BigInteger, server_default=sql("0"))
    verify_steps: Mapped[int] = mapped_column(BigInteger, server_default=sql("0"))
    draft_tokens: Mapped[int] = mapped_column(BigInteger, server_default=sql("0"))
    accepted_draft_tokens: Mapped[int] = mapped_column(BigInteger, server_default=sql("0"))


class AnswerRow(Base):
    """One answer, or the coded reason why there is none; `ragspec.jobs.answer.Answer` names the fields."""

    __tablename__ = "answers"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "idx"], ["questions.job_id", "questions.idx"], ondelete="CASCADE"),
        CheckConstraint("status IN ('completed', 'failed')", name="status_known"),
        CheckConstraint("(status = 'failed') = (error_code IS NOT NULL)", name="failed_has_code"),
        CheckConstraint(
            "finish_reason IN ('stop', 'stop_string', 'length', 'no_context', 'error')", name="finish_reason_known"
        ),
        CheckConstraint(
            "cardinality(token_ids) = completion_tokens AND cardinality(token_sources) = completion_tokens "
            "AND cardinality(token_logprobs) = completion_tokens",
            name="tokens_add_up",
        ),
        CheckConstraint(
            "cardinality(per_step_drafted) = num_verify_steps AND cardinality(per_step_accepted) = num_verify_steps",
            name="steps_add_up",
        ),
        CheckConstraint(
            "num_accepted_draft_tokens <= num_draft_tokens AND num_spec_steps <= num_verify_steps",
            name="accepted_within_drafted",
        ),
        Index("ix_answers_failed", "job_id", "idx", postgresql_where=sql("status = 'failed'")),
    )

    job_id: Mapped[UUID] = mapped_column(primary_key=True)
    idx: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    status: Mapped[str]
    text: Mapped[str] = mapped_column(server_default=sql("''"))
    finish_reason: Mapped[str] = mapped_column(server_default=sql("'error'"))
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    model: Mapped[str] = mapped_column(server_default=sql("''"))
    head: Mapped[str | None]
    template_hash: Mapped[str] = mapped_column(server_default=sql("''"))
    seed: Mapped[int] = mapped_column(BigInteger, server_default=sql("0"))
    prompt_tokens: Mapped[int] = mapped_column(server_default=sql("0"))
    completion_tokens: Mapped[int] = mapped_column(server_default=sql("0"))
    queued_ms: Mapped[float] = mapped_column(server_default=sql("0"))
    retrieval_ms: Mapped[float] = mapped_column(server_default=sql("0"))
    prefill_ms: Mapped[float] = mapped_column(server_default=sql("0"))
    decode_ms: Mapped[float] = mapped_column(server_default=sql("0"))
    passages: Mapped[list[dict[str, Any]]] = mapped_column(server_default=sql("'[]'"))
    num_verify_steps: Mapped[int] = mapped_column(server_default=sql("0"))
    num_spec_steps: Mapped[int] = mapped_column(server_default=sql("0"))
    num_draft_tokens: Mapped[int] = mapped_column(server_default=sql("0"))
    num_accepted_draft_tokens: Mapped[int] = mapped_column(server_default=sql("0"))
    mean_acceptance_length: Mapped[float] = mapped_column(server_default=sql("0"))
    draft_acceptance_rate: Mapped[float] = mapped_column(server_default=sql("0"))
    acceptance_histogram: Mapped[list[int]] = mapped_column(ARRAY(Integer), server_default=sql("'{}'"))
    token_ids: Mapped[list[int]] = mapped_column(ARRAY(Integer), server_default=sql("'{}'"))
    token_sources: Mapped[list[int]] = mapped_column(ARRAY(SmallInteger), server_default=sql("'{}'"))
    token_logprobs: Mapped[list[float]] = mapped_column(ARRAY(REAL), server_default=sql("'{}'"))
    per_step_drafted: Mapped[list[int]] = mapped_column(ARRAY(SmallInteger), server_default=sql("'{}'"))
    per_step_accepted: Mapped[list[int]] = mapped_column(ARRAY(SmallInteger), server_default=sql("'{}'"))


class RowError(Base):
    """A row of the question file that was skipped (`--on-error skip`)."""

    __tablename__ = "row_errors"

    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    line: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    custom_id: Mapped[str | None]
    code: Mapped[str]
    message: Mapped[str]
    advice: Mapped[str] = mapped_column(server_default=sql("''"))


class TokenSource(Base):
    """The legend of `answers.token_sources`: `ragspec.decoding.acceptance.Source`."""

    __tablename__ = "token_sources"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(unique=True)
