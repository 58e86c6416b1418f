"""A source of tokens: copied from another answer of the same job.

Code of revision 0001 runs on: it writes none of them, and the view's new column stands behind those that it reads.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: The view of revision 0001.
_JOBWISE = """
VIEW job_acceptance AS
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
       coalesce(sum(cardinality(array_positions(a.token_sources, 4::smallint))), 0)::bigint AS tokens_head{more}
FROM jobs j
LEFT JOIN answers a ON a.job_id = j.id AND a.status = 'completed'
GROUP BY j.id
"""
_TOKENS_JOB = """,
       coalesce(sum(cardinality(array_positions(a.token_sources, 5::smallint))), 0)::bigint AS tokens_job"""


def upgrade() -> None:
    op.execute("INSERT INTO token_sources (id, name) VALUES (5, 'job')")
    op.execute("CREATE OR REPLACE " + _JOBWISE.format(more=_TOKENS_JOB))


def downgrade() -> None:
    op.execute("DROP VIEW job_acceptance")
    op.execute("CREATE " + _JOBWISE.format(more=""))
    # Code of revision 0001 knows no such tokens; of what it knows, those copied from the same answer are nearest.
    op.execute("UPDATE answers SET token_sources = array_replace(token_sources, 5::smallint, 3::smallint)")
    op.execute("DELETE FROM token_sources WHERE id = 5")
