"""A request while it runs: its slot, its tokens and what its record needs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ragspec.decoding.acceptance import AcceptanceRecord, Source
from ragspec.decoding.request import Completion, FinishReason, Request


@dataclass(slots=True)
class Sequence:
    """A running request.

    Attributes:
        request: what was asked.
        slot: its cache slot.
        cached: tokens of prompt and answer whose keys are in the cache and count.
        tokens: emitted tokens; the newest is never cached yet.
        limit: most tokens the answer may have, by the request and the window.
    """

    request: Request
    slot: int
    limit: int
    added_at: float
    started_at: float
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    first_token_at: float = 0.0
    finish_reason: FinishReason | None = None
    _sources: list[Source] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _drafted: list[int] = field(default_factory=list)
    _accepted: list[int] = field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        """Whether some of the prompt is not in the cache yet."""
        return self.cached < len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens the answer may still take."""
        return self.limit - len(self.tokens)

    def emit(self, token: int, source: Source, logprob: float) -> None:
        """Add a token to the answer."""
        if not self.tokens:
            self.first_token_at = time.perf_counter()
        self.tokens.append(token)
        self._sources.append(source)
        self._logprobs.append(logprob)

    def record_step(self, drafted: int, accepted: int) -> None:
        """Note what a verify step was offered and what of it was emitted."""
        self._drafted.append(drafted)
        self._accepted.append(accepted)

    def complete(self, text: str) -> Completion:
        """The finished request."""
        if self.finish_reason is None:
            msg = f"request {self.request.id} has not finished"
            raise RuntimeError(msg)
        record = AcceptanceRecord(
            tuple(self.tokens),
            tuple(self._sources),
            tuple(self._logprobs),
            tuple(self._drafted),
            tuple(self._accepted),
        )
        now = time.perf_counter()
        first_token_at = self.first_token_at or now
        return Completion(
            request_id=self.request.id,
            text=text,
            finish_reason=self.finish_reason,
            acceptance=record,
            prompt_tokens=len(self.request.prompt),
            waiting_s=self.started_at - self.added_at,
            prefill_s=first_token_at - self.started_at,
            decode_s=now - first_token_at,
        )
