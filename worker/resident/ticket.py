"""A question on its way through the resident process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ragspec.jobs.answer import Question
from ragspec.jobs.options import AnswerOptions, RowOptions


@dataclass(frozen=True, slots=True)
class Ticket:
    """One question of one connection.

    Attributes:
        id: unique in this process; the engine's request id.
        connection: who asked.
        question: what was asked.
        options: what it is answered with, the row's own options included.
        seed: what it is sampled with.
        claimed_at: when its shard was claimed, monotonic seconds.
        job_id: its job, as text; None where it has none.
        stream: whether its answer is told while it is written.
    """

    id: str
    connection: int
    question: Question
    options: AnswerOptions
    seed: int
    claimed_at: float
    job_id: str | None = None
    stream: bool = False

    @property
    def interactive(self) -> bool:
        """Goes ahead of bulk questions."""
        return self.options.queue == "interactive"

    @property
    def collection(self) -> str | None:
        """What is searched for it; None where it asks for no passages."""
        return self.options.collection if self.options.top_k else None


def issue(
    number: int,
    connection: int,
    question: Question,
    job: AnswerOptions,
    claimed_at: float,
    job_id: str | None = None,
    *,
    stream: bool = False,
) -> Ticket:
    """Make the ticket of a question.

    Raises:
        pydantic.ValidationError: the row's own options are none.
    """
    row = RowOptions.model_validate(question.row_options)
    return Ticket(
        id=str(number),
        connection=connection,
        question=question,
        options=row.merged(job),
        seed=row.seed if row.seed is not None else seed_of(job.seed, question.custom_id),
        claimed_at=claimed_at,
        job_id=job_id,
        stream=stream,
    )


def seed_of(job_seed: int, custom_id: str) -> int:
    """A question's seed, in [0, 2**31): another for each question, the same whenever the job runs again."""
    digest = hashlib.sha256(f"{job_seed}:{custom_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF
