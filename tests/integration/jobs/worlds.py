"""Jobs and answers made by hand, for tests that are about something else than how they come to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine, func, insert, select, update

from ragspec.decoding.acceptance import AcceptanceRecord, Source
from ragspec.jobs.answer import Answer
from ragspec.jobs.claims import Claim, claim_shard
from ragspec.jobs.options import AnswerOptions
from ragspec.jobs.tables import AnswerRow, Job, QuestionRow, Shard

STALE_AFTER = 20.0
MAX_ATTEMPTS = 3
#: Five tokens: the prompt's own, then a step that accepts two of three drafted, then a step without a draft.
RECORD = AcceptanceRecord(
    token_ids=(11, 12, 13, 14, 2),
    token_sources=(Source.TARGET, Source.PASSAGE, Source.ANSWER, Source.TARGET, Source.TARGET),
    token_logprobs=(-0.5, -0.25, -0.125, -1.0, -0.0625),
    per_step_drafted=(3, 0),
    per_step_accepted=(2, 0),
)


def make_job(engine: Engine, questions: int = 4, shard_size: int = 2, *, queue: Any = "bulk") -> UUID:
    """A job in progress with its shards freshly enqueued."""
    job_id = uuid4()
    options = AnswerOptions(collection="handbook", queue=queue)
    with engine.begin() as connection:
        connection.execute(
            insert(Job).values(
                id=job_id,
                state="in_progress",
                collection="handbook",
                source_name="questions.jsonl",
                fingerprint=job_id.hex,
                resumable=True,
                options=options.model_dump(mode="json"),
                queue=queue,
                questions_total=questions,
                shard_size=shard_size,
            )
        )
        connection.execute(
            insert(QuestionRow),
            [{"job_id": job_id, "idx": i, "custom_id": f"q{i}", "text": f"question {i}?"} for i in range(questions)],
        )
        connection.execute(
            insert(Shard).values(enqueued_at=func.now()),
            [
                {"job_id": job_id, "shard_no": n, "start_idx": start, "end_idx": min(start + shard_size, questions)}
                for n, start in enumerate(range(0, questions, shard_size))
            ],
        )
    return job_id


def claim(engine: Engine, job_id: UUID, shard_no: int = 0, worker: str = "w1") -> Claim:
    """A claim that must succeed."""
    claimed = claim_shard(engine, job_id, shard_no, worker, stale_after=STALE_AFTER, max_attempts=MAX_ATTEMPTS)
    assert claimed is not None
    return claimed.claim


def completed(idx: int, text: str = "Paris") -> Answer:
    return Answer(
        idx=idx,
        status="completed",
        text=text,
        finish_reason="stop",
        model="tiny@0123",
        template_hash="abcd",
        prompt_tokens=7,
        completion_tokens=len(RECORD.token_ids),
        queued_ms=1.0,
        retrieval_ms=2.0,
        prefill_ms=3.0,
        decode_ms=4.0,
        passages=[{"id": "p1", "document": "a.md", "title": "A", "score": 0.5, "text": "Paris it is", "metadata": {}}],
        num_verify_steps=RECORD.num_verify_steps,
        num_spec_steps=RECORD.num_spec_steps,
        num_draft_tokens=RECORD.num_draft_tokens,
        num_accepted_draft_tokens=RECORD.num_accepted_draft_tokens,
        mean_acceptance_length=RECORD.mean_acceptance_length,
        draft_acceptance_rate=RECORD.draft_acceptance_rate,
        acceptance_histogram=list(RECORD.acceptance_histogram),
        token_ids=list(RECORD.token_ids),
        token_sources=[int(source) for source in RECORD.token_sources],
        token_logprobs=list(RECORD.token_logprobs),
        per_step_drafted=list(RECORD.per_step_drafted),
        per_step_accepted=list(RECORD.per_step_accepted),
    )


def failed(idx: int, code: str = "prompt_too_long") -> Answer:
    return replace(Answer(idx=idx, status="failed"), error_code=code, error_message="It does not fit.")


def silence(engine: Engine, claim: Claim) -> None:
    """Make the claim's last sign of life older than any limit."""
    with engine.begin() as connection:
        connection.execute(
            update(Shard)
            .where(Shard.job_id == claim.job_id, Shard.shard_no == claim.shard_no)
            .values(heartbeat_at=func.now() - func.make_interval(0, 0, 0, 1))
        )


def age_messages(engine: Engine, job_id: UUID) -> None:
    """Make every message of the job an hour old."""
    with engine.begin() as connection:
        connection.execute(
            update(Shard)
            .where(Shard.job_id == job_id)
            .values(enqueued_at=Shard.enqueued_at - func.make_interval(0, 0, 0, 0, 1))
        )


def shard_row(engine: Engine, job_id: UUID, shard_no: int = 0) -> Any:
    with engine.connect() as connection:
        query = select(*Shard.__table__.columns).where(Shard.job_id == job_id, Shard.shard_no == shard_no)
        return connection.execute(query).one()


def answer_texts(engine: Engine, job_id: UUID) -> dict[int, str]:
    with engine.connect() as connection:
        query = select(AnswerRow.idx, AnswerRow.text).where(AnswerRow.job_id == job_id).order_by(AnswerRow.idx)
        return {row.idx: row.text for row in connection.execute(query)}
