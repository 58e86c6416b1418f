"""Recording answers behind the fence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, and_, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from ragspec.jobs.answer import Answer
from ragspec.jobs.fence import Claim, hold
from ragspec.jobs.tables import AnswerRow, Shard


def record_answers(engine: Engine, claim: Claim, answers: Sequence[Answer]) -> int:
    """Write answers of the claim's shard in one transaction; returns the rows written, 0 if the claim is lost.

    A row of a newer attempt is never replaced, nor a completed answer by another attempt's. Writing the same answers
    again under the same claim is harmless. The shard's counters move in the same transaction.

    Raises:
        ValueError: an answer lies outside the shard.
    """
    if not answers:
        return 0
    with engine.begin() as connection:
        shard = hold(connection, claim)
        if shard is None:
            return 0
        stray = [answer.idx for answer in answers if answer.idx not in shard]
        if stray:
            msg = f"answers {stray} lie outside shard {claim.shard_no} [{shard.start}, {shard.stop})"
            raise ValueError(msg)
        # One statement writes many rows and may touch each row once: the last of several answers to a question wins.
        rows = {answer.idx: _row(claim, answer) for answer in answers}
        written = len(connection.scalars(_upsert(), list(rows.values())).all())
        count_answers(connection, claim.job_id, claim.shard_no)
    return written


def count_answers(connection: Connection, job_id: UUID, shard_no: int) -> None:
    """Set the shard's counters to what its answers say. The caller holds the shard's row lock.

    Counted anew, not added up: one index range of a shard's size is cheap, and it cannot drift.
    """
    completed = AnswerRow.status == "completed"
    counts = connection.execute(
        select(
            func.count().filter(completed).label("completed"),
            func.count().filter(~completed).label("failed"),
            func.coalesce(func.sum(AnswerRow.completion_tokens), 0).label("completion_tokens"),
            func.coalesce(func.sum(func.greatest(AnswerRow.completion_tokens - 1, 0)), 0).label("step_tokens"),
            func.coalesce(func.sum(AnswerRow.num_verify_steps), 0).label("verify_steps"),
            func.coalesce(func.sum(AnswerRow.num_draft_tokens), 0).label("draft_tokens"),
            func.coalesce(func.sum(AnswerRow.num_accepted_draft_tokens), 0).label("accepted_draft_tokens"),
        )
        .join(Shard, and_(Shard.job_id == AnswerRow.job_id, AnswerRow.idx >= Shard.start_idx))
        .where(Shard.job_id == job_id, Shard.shard_no == shard_no, AnswerRow.idx < Shard.end_idx)
    ).one()
    connection.execute(
        update(Shard).where(Shard.job_id == job_id, Shard.shard_no == shard_no).values(**counts._mapping)  # noqa: SLF001 - SQLAlchemy's public name
    )


def _upsert() -> Any:
    statement = insert(AnswerRow)
    replaced = {
        column.name: statement.excluded[column.name]
        for column in AnswerRow.__table__.columns
        if column.name not in {"job_id", "idx", "created_at"}
    }
    same_attempt = AnswerRow.attempt == statement.excluded.attempt
    older_failure = and_(AnswerRow.attempt < statement.excluded.attempt, AnswerRow.status == "failed")
    return statement.on_conflict_do_update(
        index_elements=["job_id", "idx"],
        set_={**replaced, "created_at": func.now()},
        where=or_(same_attempt, older_failure),
    ).returning(AnswerRow.idx)


def _row(claim: Claim, answer: Answer) -> dict[str, Any]:
    return {
        **asdict(answer),
        "job_id": claim.job_id,
        "attempt": claim.attempt,
        "text": _storable(answer.text),
        "error_message": _storable(answer.error_message),
        "passages": _storable(answer.passages),
    }


def _storable(value: Any) -> Any:
    """What PostgreSQL cannot hold, made holdable: NUL and lone surrogates in text, NaN and infinity in JSON.

    A model or a document may hold any of them, and one such character must not cost its batch.
    """
    match value:
        case str():
            return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
        case dict():
            return {_storable(key): _storable(item) for key, item in value.items()}
        case list() | tuple():
            return [_storable(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
