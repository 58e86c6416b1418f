"""One answer as it travels from the engine to its row. This file imports neither torch nor SQLAlchemy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: How an answer ended; `no_context`: nothing was retrieved and the setting says not to answer; `error`: see error_code.
AnswerFinish = Literal["stop", "stop_string", "length", "no_context", "error"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a job.

    Attributes:
        idx: its place in the job, from 0.
        custom_id: the user's name for it.
        text: the question.
        row_options: what the row sets for itself, a `RowOptions` dump without its unset fields.
    """

    idx: int
    custom_id: str
    text: str
    row_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or the coded reason why there is none.

    Attributes:
        idx: the question's place in its job.
        status: `completed` or `failed`.
        text: the answer; empty where it failed.
        finish_reason: how it ended.
        error_code, error_message: set where status is `failed`.
        model: the target's id and fingerprint, `name@fingerprint`.
        head: the speculation head's id, or None.
        template_hash: first 16 hex digits of the prompt template's SHA-256.
        seed: the seed it was sampled with.
        prompt_tokens, completion_tokens: counts.
        queued_ms, retrieval_ms, prefill_ms, decode_ms: where the time went; queued is from the claim of its shard to
            the engine's first step on it, less retrieval.
        passages: what was retrieved and used, best first:
            `{"id", "document", "title", "score", "text", "metadata"}` each.
        token_ids, token_sources, token_logprobs, per_step_drafted, per_step_accepted, num_*, mean_acceptance_length,
        draft_acceptance_rate, acceptance_histogram: see `ragspec.decoding.acceptance.AcceptanceRecord`.
    """

    idx: int
    status: Literal["completed", "failed"]
    text: str = ""
    finish_reason: AnswerFinish = "error"
    error_code: str | None = None
    error_message: str | None = None
    model: str = ""
    head: str | None = None
    template_hash: str = ""
    seed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queued_ms: float = 0.0
    retrieval_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    passages: list[dict[str, Any]] = field(default_factory=list)
    num_verify_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    mean_acceptance_length: float = 0.0
    draft_acceptance_rate: float = 0.0
    acceptance_histogram: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_sources: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
