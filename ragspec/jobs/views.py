"""The two views, as queries see them; the migrations hold their SQL.

token_acceptance: one row an emitted token, with who proposed it and what its verify step drafted and accepted.
job_acceptance: one row a job, with its completed answers summed up. It reads every answer: progress reads the shards.
"""

from __future__ import annotations

from sqlalchemy import column, table

token_acceptance = table(
    "token_acceptance",
    *map(
        column,
        (
            "job_id",
            "idx",
            "custom_id",
            "position",
            "token_id",
            "source",
            "logprob",
            "step",
            "drafted",
            "accepted",
        ),
    ),
)
job_acceptance = table(
    "job_acceptance",
    *map(
        column,
        (
            "job_id",
            "answers",
            "tokens",
            "steps",
            "drafted",
            "accepted",
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "tokens_target",
            "tokens_passage",
            "tokens_prompt",
            "tokens_answer",
            "tokens_head",
            "tokens_job",
        ),
    ),
)
