"""Jobs, questions, shards, answers, skipped rows, the legend of token sources, and two views."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

#: One row a token. Verify step i (from 1) emits its accepted draft tokens and one of the target's; position 0 came out
#: of the prompt's own pass and is step 0. Tokens after an end inside a draft were never emitted, hence the bound.
_TOKENWISE = """
CREATE VIEW token_acceptance AS
SELECT a.job_id, a.idx, q.custom_id, t.position, t.token_id, s.name AS source, t.logprob, t.step, t.drafted, t.accepted
FROM answers a
JOIN questions q ON q.job_id = a.job_id AND q.idx = a.idx
CROSS JOIN LATERAL (
    SELECT token.ord::int - 1 AS position, token.token_id, token.source, token.logprob,
           coalesce(emitted.step, 0) AS step, emitted.drafted, emitted.accepted
    FROM unnest(a.token_ids, a.token_sources, a.token_logprobs)
         WITH ORDINALITY AS token (token_id, source, logprob, ord)
    LEFT JOIN (
        SELECT step.step::int AS step, step.drafted, step.accepted,
               step.first_position + emitted_by_step.k AS position
        FROM (
            SELECT per_step.ord AS step, per_step.drafted, per_step.accepted,
                   (sum(per_step.accepted + 1) OVER (ORDER BY per_step.ord) - per_step.accepted)::int AS first_position
            FROM unnest(a.per_step_drafted, a.per_step_accepted)
                 WITH ORDINALITY AS per_step (drafted, accepted, ord)
        ) AS step
        CROSS JOIN LATERAL generate_series(0, step.accepted) AS emitted_by_step (k)
    ) AS emitted ON emitted.position = token.ord - 1
) AS t
JOIN token_sources s ON s.id = t.source
"""

#: One row a job. An answer's first token belongs to no verify step. array_positions counts a source without
#: unfolding the array into rows, which would be five times slower.
_JOBWISE = """
CREATE VIEW job_acceptance AS
SELECT j.id AS job_id,
       count(a.idx) AS answers,
       coalesce(sum(a.completion_tokens), 0)::bigint AS tokens,
       coalesce(sum(a.num_verify_steps), 0)::bigint AS steps,
       coalesce(sum(a.num_draft_tokens), 0)::bigint AS drafted,
       coalesce(sum(a.num_accepted_draft_tokens), 0)::bigint AS accepted,
       coalesce(sum(greatest(a.completion_tokens - 1, 0))::float8 / nullif(sum(a.num_verify_steps), 0), 0)
           AS mean_acceptance_length,
       coalesce(sum(a.num_accepted_draft_tokens)::float8 / nullif(sum(a.num_draft_tokens), 0), 0)
           AS draft_acceptance_rate,
       coalesce(sum(cardinality(array_positions(a.token_sources, 0::smallint))), 0)::bigint AS tokens_target,
       coalesce(sum(cardinality(array_positions(a.token_sources, 1::smallint))), 0)::bigint AS tokens_passage,
       coalesce(sum(cardinality(array_positions(a.token_sources, 2::smallint))), 0)::bigint AS tokens_prompt,
       coalesce(sum(cardinality(array_positions(a.token_sources, 3::smallint))), 0)::bigint AS tokens_answer,
       coalesce(sum(cardinality(array_positions(a.token_sources, 4::smallint))), 0)::bigint AS tokens_head
FROM jobs j
LEFT JOIN answers a ON a.job_id = j.id AND a.status = 'completed'
GROUP BY j.id
"""

#: `ragspec.decoding.acceptance.Source` as it was at this revision.
_SOURCES = ("target", "passage", "prompt", "answer", "head")


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("collection", sa.Text(), nullable=False),
        sa.Column("source_name", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("resumable", sa.Boolean(), nullable=False),
        sa.Column("options", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("questions_total", sa.Integer(), nullable=False),
        sa.Column("shard_size", sa.Integer(), nullable=False),
        sa.Column("row_errors", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('completed', 'failed', 'expired', 'cancelled'))",
            name=op.f("ck_jobs_finished_has_time"),
        ),
        sa.CheckConstraint("queue IN ('bulk', 'interactive')", name=op.f("ck_jobs_queue_known")),
        sa.CheckConstraint(
            "state IN ('validating', 'in_progress', 'finalizing', 'completed', 'failed', 'expired', "
            "'cancelling', 'cancelled')",
            name=op.f("ck_jobs_state_known"),
        ),
        sa.CheckConstraint(
            "questions_total >= 0 AND shard_size > 0 AND row_errors >= 0", name=op.f("ck_jobs_counts_positive")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"], unique=False)
    op.create_index(
        "ix_jobs_fingerprint_resumable", "jobs", ["fingerprint"], unique=True, postgresql_where=sa.text("resumable")
    )
    op.create_index(
        "ix_jobs_unfinished",
        "jobs",
        ["state"],
        unique=False,
        postgresql_where=sa.text("state IN ('in_progress', 'finalizing', 'cancelling')"),
    )
    token_sources = op.create_table(
        "token_sources",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token_sources")),
        sa.UniqueConstraint("name", name=op.f("uq_token_sources_name")),
    )
    op.create_table(
        "questions",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("idx", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column(
            "row_options", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_questions_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "idx", name=op.f("pk_questions")),
        sa.UniqueConstraint("job_id", "custom_id", name=op.f("uq_questions_job_id_custom_id")),
    )
    op.create_table(
        "row_errors",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=True),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("advice", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_row_errors_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "line", name=op.f("pk_row_errors")),
    )
    op.create_table(
        "shards",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("shard_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("start_idx", sa.Integer(), nullable=False),
        sa.Column("end_idx", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'queued'"), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("enqueued_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("claimed_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("heartbeat_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("completed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("failed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("step_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("verify_steps", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("draft_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("accepted_draft_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint(
            "state <> 'done' OR completed + failed = end_idx - start_idx", name=op.f("ck_shards_done_means_answered")
        ),
        sa.CheckConstraint(
            "state <> 'running' OR heartbeat_at IS NOT NULL", name=op.f("ck_shards_running_has_heartbeat")
        ),
        sa.CheckConstraint("state IN ('queued', 'running', 'done')", name=op.f("ck_shards_state_known")),
        sa.CheckConstraint("completed + failed <= end_idx - start_idx", name=op.f("ck_shards_counters_within_range")),
        sa.CheckConstraint("start_idx >= 0 AND end_idx > start_idx", name=op.f("ck_shards_range_positive")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_shards_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "shard_no", name=op.f("pk_shards")),
    )
    op.create_index(
        "ix_shards_open", "shards", ["state", "job_id"], unique=False, postgresql_where=sa.text("state <> 'done'")
    )
    op.create_table(
        "answers",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("idx", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("finish_reason", sa.Text(), server_default=sa.text("'error'"), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("head", sa.Text(), nullable=True),
        sa.Column("template_hash", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("seed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("queued_ms", sa.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False),
        sa.Column("retrieval_ms", sa.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False),
        sa.Column("prefill_ms", sa.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False),
        sa.Column("decode_ms", sa.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False),
        sa.Column("passages", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("num_verify_steps", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_spec_steps", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_draft_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_accepted_draft_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("mean_acceptance_length", sa.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False),
        sa.Column("draft_acceptance_rate", sa.DOUBLE_PRECISION(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "acceptance_histogram", postgresql.ARRAY(sa.Integer()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("token_ids", postgresql.ARRAY(sa.Integer()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("token_sources", postgresql.ARRAY(sa.SmallInteger()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("token_logprobs", postgresql.ARRAY(sa.REAL()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column(
            "per_step_drafted", postgresql.ARRAY(sa.SmallInteger()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column(
            "per_step_accepted", postgresql.ARRAY(sa.SmallInteger()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.CheckConstraint("(status = 'failed') = (error_code IS NOT NULL)", name=op.f("ck_answers_failed_has_code")),
        sa.CheckConstraint(
            "finish_reason IN ('stop', 'stop_string', 'length', 'no_context', 'error')",
            name=op.f("ck_answers_finish_reason_known"),
        ),
        sa.CheckConstraint("status IN ('completed', 'failed')", name=op.f("ck_answers_status_known")),
        sa.CheckConstraint(
            "cardinality(per_step_drafted) = num_verify_steps AND cardinality(per_step_accepted) = num_verify_steps",
            name=op.f("ck_answers_steps_add_up"),
        ),
        sa.CheckConstraint(
            "cardinality(token_ids) = completion_tokens AND cardinality(token_sources) = completion_tokens "
            "AND cardinality(token_logprobs) = completion_tokens",
            name=op.f("ck_answers_tokens_add_up"),
        ),
        sa.CheckConstraint(
            "num_accepted_draft_tokens <= num_draft_tokens AND num_spec_steps <= num_verify_steps",
            name=op.f("ck_answers_accepted_within_drafted"),
        ),
        sa.ForeignKeyConstraint(
            ["job_id", "idx"],
            ["questions.job_id", "questions.idx"],
            name=op.f("fk_answers_job_id_idx_questions"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", "idx", name=op.f("pk_answers")),
    )
    op.create_index(
        "ix_answers_failed", "answers", ["job_id", "idx"], unique=False, postgresql_where=sa.text("status = 'failed'")
    )
    op.bulk_insert(token_sources, [{"id": number, "name": name} for number, name in enumerate(_SOURCES)])
    op.execute(_TOKENWISE)
    op.execute(_JOBWISE)


def downgrade() -> None:
    op.execute("DROP VIEW job_acceptance")
    op.execute("DROP VIEW token_acceptance")
    op.drop_index("ix_answers_failed", table_name="answers", postgresql_where=sa.text("status = 'failed'"))
    op.drop_table("answers")
    op.drop_index("ix_shards_open", table_name="shards", postgresql_where=sa.text("state <> 'done'"))
    op.drop_table("shards")
    op.drop_table("row_errors")
    op.drop_table("questions")
    op.drop_table("token_sources")
    op.drop_index(
        "ix_jobs_unfinished",
        table_name="jobs",
        postgresql_where=sa.text("state IN ('in_progress', 'finalizing', 'cancelling')"),
    )
    op.drop_index("ix_jobs_fingerprint_resumable", table_name="jobs", postgresql_where=sa.text("resumable"))
    op.drop_index("ix_jobs_created_at", table_name="jobs")
    op.drop_table("jobs")
