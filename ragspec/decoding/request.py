"""What goes into the engine and what comes out. This file imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ragspec.decoding.acceptance import AcceptanceRecord, Source
from ragspec.errors import InputError

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
        min_tokens: before so many tokens neither an end token nor a stop string ends the answer (as in vLLM): end tokens are
            barred, and a stop string counts where it is completed behind them.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that prompt or answer hold
            (CTRL, arXiv 1909.05858; as in transformers); above 0, 1 changes nothing.
        presence_penalty: taken from the logits of tokens that the answer holds (as in OpenAI's API and vLLM), -2 to 2.
        frequency_penalty: the same once for each time that the answer holds them, -2 to 2.
        logit_bias: (token id, added to its logit) pairs, -100 to 100 each.

    Raises:
        InputError: a value means nothing; the message names its field (code `bad_option`).
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    speculation: bool = True
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what means nothing. Comparisons are written so that NaN fails them."""
        biases = [bias for _, bias in self.logit_bias]
        for name, allowed, fits in (
            ("max_tokens", "at least 1", self.max_tokens >= 1),
            ("temperature", "finite and at least 0", 0 <= self.temperature < math.inf),
            ("top_p", "above 0 and at most 1", 0 < self.top_p <= 1),
            ("top_k", "at least 0", self.top_k >= 0),
            ("seed", "from 0 to 2**63 - 1", 0 <= self.seed < 2**63),
            ("min_tokens", f"from 0 to max_tokens={self.max_tokens}", 0 <= self.min_tokens <= self.max_tokens),
            ("repetition_penalty", "finite and above 0", 0 < self.repetition_penalty < math.inf),
            ("presence_penalty", "from -2 to 2", -2 <= self.presence_penalty <= 2),
            ("frequency_penalty", "from -2 to 2", -2 <= self.frequency_penalty <= 2),
            ("logit_bias", "from -100 to 100 for each token", all(-100 <= bias <= 100 for bias in biases)),
        ):
            if not fits:
                value = getattr(self, name)
                raise InputError(f"{name} is {value!r}.", f"It must be {allowed}.", code="bad_option")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued.

    Attributes:
        id: the caller's name for it, unique among running requests.
        prompt: token ids, [n], n >= 1.
        sampling: how to continue.
        passage_spans: [start, end) token ranges of the retrieved passages inside `prompt`.
        interactive: goes ahead of bulk requests, and takes the slot of one where none is free.
        stream: whether `Engine.fresh` tells what each step adds to its answer.
        group: the job it belongs to; drafts may copy from the answers of its group, and of no other. None: from its own text.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    passage_spans: tuple[tuple[int, int], ...] = ()
    interactive: bool = False
    group: str | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a step added to an answer.

    Attributes:
        request_id: whose.
        start: tokens that stand before these.
        tokens: the new ones, end token included, [n].
        sources: who proposed each, [n].
    """

    request_id: str
    start: int
    tokens: tuple[int, ...]
    sources: tuple[Source, ...]


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
        cached_prompt_tokens: of the prompt's tokens, those whose keys another request had left in the cache.
    """

    request_id: str
    text: str
    finish_reason: FinishReason
    acceptance: AcceptanceRecord
    prompt_tokens: int
    waiting_s: float
    prefill_s: float
    decode_s: float
    cached_prompt_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        """Tokens emitted, end token included."""
        return len(self.acceptance.token_ids)
