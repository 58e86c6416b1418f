"""What goes into the engine and what comes out. This file imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragspec.decoding.acceptance import AcceptanceRecord

#: `stop`: the target's end token; `stop_string`: one of the request's; `length`: the token limit or the window; `error`: the
#: target's numbers ceased to be finite, and what it wrote before is not to be trusted.
FinishReason = Literal["stop", "stop_string", "length", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer's tokens are chosen.

    Attributes:
        max_tokens: most tokens of an answer, end token included.
        temperature: 0 is greedy, and so is anything below 1e-5.
        top_p: nucleus mass in (0, 1]; 1 keeps all.
        top_k: keep the k likeliest; 0 keeps all.
        seed: makes sampling repeatable; the same seed gives the same text whatever the batch or the draft.
        stop: strings that end an answer; the text ends before the first that appears.
        speculation: False decodes this request plainly.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    speculation: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued.

    Attributes:
        id: the caller's name for it, unique among running requests.
        prompt: token ids, [n], n >= 1.
        sampling: how to continue.
        passage_spans: [start, end) token ranges of the retrieved passages inside `prompt`.
        interactive: goes ahead of bulk requests when a slot is free.
        group: the job it belongs to; drafts may copy from the answers of its group, and of no other. None: from its own text.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    passage_spans: tuple[tuple[int, int], ...] = ()
    interactive: bool = False
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    Attributes:
        request_id: whose.
        text: the answer, without special tokens and cut before a stop string.
        finish_reason: why it ended.
        acceptance: every token and who proposed it.
        prompt_tokens: length of the prompt.
        waiting_s: seconds between `add` and the first step that worked on it.
        prefill_s: seconds between that and its first token.
        decode_s: seconds between its first token and its last.
    """

    request_id: str
    text: str
    finish_reason: FinishReason
    acceptance: AcceptanceRecord
    prompt_tokens: int
    waiting_s: float
    prefill_s: float
    decode_s: float

    @property
    def completion_tokens(self) -> int:
        """Tokens emitted, end token included."""
        return len(self.acceptance.token_ids)
