"""A request while it waits and runs: its slot, its tokens and what its record needs."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import NamedTuple

from ragspec.decoding.acceptance import AcceptanceRecord, Source
from ragspec.decoding.request import Completion, FinishReason, Request

#: The slot of a sequence that has none: it waits, or its prompt has not been begun.
NO_SLOT = -1


class Emission(NamedTuple):
    """What a step gives a sequence.

    Attributes:
        cached: tokens whose keys count from now on, besides those that did.
        tokens: new ones of the answer, [n].
        sources: who proposed each, [n].
        logprobs: of each, [n].
        verified: of a verify step, one pair: draft tokens that it was offered, and how many of them are emitted.
        finish_reason: why the answer ends with them, if it does.
        at: when they were known, in seconds of `time.perf_counter`.
    """

    cached: int
    tokens: Sequences[int] = ()
    sources: Sequences[Source] = ()
    logprobs: Sequences[float] = ()
    verified: Sequences[tuple[int, int]] = ()
    finish_reason: FinishReason | None = None
    at: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine.

    Attributes:
        request: what was asked.
        arrival: its place in the order of arrival.
        limit: most tokens the answer may have, by the request and the window.
        slot: its cache slot, or `NO_SLOT`.
        cached: tokens of prompt and answer whose keys are in the slot and count.
        reused: tokens of the prompt that it found in the cache when it was first begun; None before.
        tokens: emitted tokens; the newest is never cached yet.
        preemptions: how often it lost its slot to an interactive request.
    """

    request: Request
    arrival: int
    limit: int
    added_at: float
    started_at: float = 0.0
    slot: int = NO_SLOT
    cached: int = 0
    reused: int | None = None
    preemptions: int = 0
    tokens: list[int] = field(default_factory=list)
    first_token_at: float = 0.0
    finish_reason: FinishReason | None = None
    _sources: list[Source] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _verified: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rank(self) -> tuple[bool, int]:
        """Its place among others, the first is the least: interactive ones first, then by arrival."""
        return not self.request.interactive, self.arrival

    @property
    def prefill_end(self) -> int:
        """Tokens that are in the cache before it decodes: the prompt, and once it has begun an answer all but the newest."""
        return len(self.request.prompt) + max(0, len(self.tokens) - 1)

    @property
    def reusable(self) -> int:
        """How many of those may come from another's slot: not the last before the first token, whose logits are needed."""
        return self.prefill_end if self.tokens else self.prefill_end - 1

    @property
    def prefilling(self) -> bool:
        """Whether some of them are not in the cache yet."""
        return self.cached < self.prefill_end

    def text(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end) of prompt and answer."""
        size = len(self.request.prompt)
        prompt = self.request.prompt[start:end]
        return prompt if end <= size else (*prompt, *self.tokens[max(0, start - size) : end - size])

    @property
    def remaining(self) -> int:
        """Tokens the answer may still take."""
        return self.limit - len(self.tokens)

    def take(self, emission: Emission) -> None:
        """Add what a step gives: all of it or nothing.

        Nothing is called and nothing repeated in here: only there does Python handle a Ctrl-C.
        """
        if emission.tokens and not self.tokens:
            self.first_token_at = emission.at
        self.tokens += emission.tokens
        self._sources += emission.sources
        self._logprobs += emission.logprobs
        self._verified += emission.verified
        self.cached += emission.cached
        self.finish_reason = emission.finish_reason

    def complete(self, text: str) -> Completion:
        """The finished request."""
        if self.finish_reason is None:
            msg = f"request {self.request.id} has not finished"
            raise RuntimeError(msg)
        record = AcceptanceRecord(
            tuple(self.tokens),
            tuple(self._sources),
            tuple(self._logprobs),
            tuple(offered for offered, _ in self._verified),
            tuple(accepted for _, accepted in self._verified),
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
            cached_prompt_tokens=self.reused or 0,
        )
