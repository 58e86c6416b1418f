"""The answers that leave the resident process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragspec.corpus.passage import Passage
from ragspec.decoding.request import Completion
from ragspec.errors import RagspecError
from ragspec.jobs.answer import Answer
from worker.resident.ticket import Ticket

#: The text of an answer that finished with `no_context`.
NO_CONTEXT_TEXT = "Nothing was found in the collection for this question."


@dataclass(frozen=True, slots=True)
class Identity:
    """What answered; it is written on every answer, failed ones too."""

    model: str
    head: str | None
    template_hash: str


@dataclass(frozen=True, slots=True)
class Timing:
    """When a question moved on, seconds; `added_at` is monotonic."""

    added_at: float
    retrieval_s: float


def answered(
    ticket: Ticket, completion: Completion, passages: Sequence[Passage], timing: Timing, identity: Identity
) -> Answer:
    """The answer that a completion is, or the failed row where the target's numbers ceased to be finite."""
    if completion.finish_reason == "error":
        written = completion.completion_tokens
        msg = f"The target's output was not finite after {written} tokens; try RAGSPEC_PRECISION=float32."
        return failed(ticket, RagspecError(msg, code="not_finite"), identity)
    record = completion.acceptance
    queued_s = timing.added_at + completion.waiting_s - ticket.claimed_at - timing.retrieval_s
    return Answer(
        idx=ticket.question.idx,
        status="completed",
        text=completion.text,
        finish_reason=completion.finish_reason,
        **_signature(ticket, identity),
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        queued_ms=max(queued_s, 0.0) * 1000,
        retrieval_ms=timing.retrieval_s * 1000,
        prefill_ms=completion.prefill_s * 1000,
        decode_ms=completion.decode_s * 1000,
        passages=[_passage(passage) for passage in passages],
        num_verify_steps=record.num_verify_steps,
        num_spec_steps=record.num_spec_steps,
        num_draft_tokens=record.num_draft_tokens,
        num_accepted_draft_tokens=record.num_accepted_draft_tokens,
        mean_acceptance_length=record.mean_acceptance_length,
        draft_acceptance_rate=record.draft_acceptance_rate,
        acceptance_histogram=list(record.acceptance_histogram),
        token_ids=list(record.token_ids),
        token_sources=[int(source) for source in record.token_sources],
        token_logprobs=list(record.token_logprobs),
        per_step_drafted=list(record.per_step_drafted),
        per_step_accepted=list(record.per_step_accepted),
    )


def without_context(ticket: Ticket, retrieval_s: float, identity: Identity) -> Answer:
    """The answer of a question for which nothing was retrieved, where the setting says not to guess."""
    return Answer(
        idx=ticket.question.idx,
        status="completed",
        text=NO_CONTEXT_TEXT,
        finish_reason="no_context",
        retrieval_ms=retrieval_s * 1000,
        **_signature(ticket, identity),
    )


def failed(ticket: Ticket, error: Exception, identity: Identity, code: str | None = None) -> Answer:
    """The failure of one row.

    Args:
        ticket: whose.
        error: its message is shown to the user.
        identity: what it failed on.
        code: overrides the error's own; an error that is not ours has `internal_error`.
    """
    known = isinstance(error, RagspecError)
    return Answer(
        idx=ticket.question.idx,
        status="failed",
        error_code=code or (error.error_code if isinstance(error, RagspecError) else "internal_error"),
        error_message=str(error) if known else f"{type(error).__name__}: {error}",
        **_signature(ticket, identity),
    )


def _signature(ticket: Ticket, identity: Identity) -> dict[str, Any]:
    return {**asdict(identity), "seed": ticket.seed}


def _passage(passage: Passage) -> dict[str, Any]:
    return {
        "id": passage.id,
        "document": passage.document,
        "title": passage.title,
        "score": float(passage.score),
        "text": passage.text,
        "metadata": dict(passage.metadata),
    }
