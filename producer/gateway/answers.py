"""An answer as JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ragspec.decoding.acceptance import Source
from ragspec.jobs.answer import Answer


class Latency(BaseModel):
    """Milliseconds by part; `total` is what the gateway saw, and the rest of it was spent on the way."""

    queue: float
    retrieval: float
    prefill: float
    decode: float
    total: float


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Acceptance(BaseModel):
    """What speculation did; names are vLLM's where it has one. `token_sources` says who proposed each token."""

    num_verify_steps: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    per_step_drafted: list[int]
    per_step_accepted: list[int]
    token_ids: list[int]
    token_sources: list[str]
    token_logprobs: list[float]


class Generated(BaseModel):
    """The answer to one question.

    Attributes:
        answer: its text.
        finish_reason: `stop`, `stop_string`, `length` or `no_context`.
        model: the target, `name@fingerprint+precision`.
        head: the speculation head, or null.
        collection: what was searched.
        passages: what was found and used, best first.
        latency_ms: where the time went.
        tokens_per_second: of the decoding.
        usage: token counts.
        acceptance: the record.
    """

    answer: str
    finish_reason: str
    model: str
    head: str | None
    collection: str
    passages: list[dict[str, Any]]
    latency_ms: Latency
    tokens_per_second: float
    usage: Usage
    acceptance: Acceptance


def generated(answer: Answer, collection: str, total_s: float) -> Generated:
    """What is sent of an answer that took so long."""
    decode_s = answer.decode_ms / 1000
    return Generated(
        answer=answer.text,
        finish_reason=answer.finish_reason,
        model=answer.model,
        head=answer.head,
        collection=collection,
        passages=answer.passages,
        latency_ms=Latency(
            queue=round(answer.queued_ms, 3),
            retrieval=round(answer.retrieval_ms, 3),
            prefill=round(answer.prefill_ms, 3),
            decode=round(answer.decode_ms, 3),
            total=round(total_s * 1000, 3),
        ),
        tokens_per_second=round(max(0, answer.completion_tokens - 1) / decode_s, 2) if decode_s else 0.0,
        usage=usage(answer),
        acceptance=acceptance(answer),
    )


def usage(answer: Answer) -> Usage:
    """Its token counts."""
    return Usage(
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        total_tokens=answer.prompt_tokens + answer.completion_tokens,
    )


def acceptance(answer: Answer) -> Acceptance:
    """Its record, with names for the sources' numbers."""
    fields = {name: getattr(answer, name) for name in Acceptance.model_fields if name != "token_sources"}
    return Acceptance(**fields, token_sources=[Source(number).name.lower() for number in answer.token_sources])
