"""The target alone: one request, one token at a time, the whole text through the model each time.

No cache, no batch, no draft, transformers' own attention, and nothing of the engine but the numbers that a seed stands for.
So what it writes is what the engine has to write.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ragspec.decoding.request import FinishReason, Sampling
from ragspec.decoding.target import Target
from ragspec.decoding.verification import uniform

#: Choices closer than this, in logits or probability, may fall otherwise on a processor that sums in another order.
ROUNDING = 1e-4

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target writes.

    Attributes:
        tokens: end token included.
        logprobs: of each under the plain softmax.
        text: cut before a stop string.
        finish_reason: why it ends.
        certain: no choice in it was within rounding.
    """

    tokens: Tokens
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    certain: bool


def cut(answer: Answer, limit: int, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """The answer where the window leaves room for `limit` tokens."""
    if len(answer.tokens) <= limit:
        return answer
    tokens = answer.tokens[:limit]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return replace(answer, tokens=tokens, logprobs=answer.logprobs[:limit], text=text, finish_reason="length")


class PlainDecoder:
    """Decodes with a target's weights and remembers the logits behind every text it has seen."""

    def __init__(self, target: Target) -> None:
        self._model = copy.deepcopy(target.model)
        self._model.set_attn_implementation("eager")
        self._ends = target.eos_ids
        self._letters = [target.tokenizer.decode([i], skip_special_tokens=True) for i in range(target.vocabulary)]
        self._logits: dict[Tokens, np.ndarray] = {}

    def answer(self, prompt: Tokens, sampling: Sampling) -> Answer:
        """What the target writes behind a prompt."""
        tokens: Tokens = ()
        logprobs: list[float] = []
        certain = True
        while True:
            logits = self._behind(prompt + tokens)
            scores = self._adjusted(logits, prompt, tokens, sampling)
            token, clear = _choose(scores, sampling, len(tokens))
            certain &= clear
            tokens += (token,)
            logprobs.append(float(logits[token] - np.logaddexp.reduce(logits)))
            text = self.text(tokens)
            stop = self._stop(tokens, sampling)
            if token in self._ends or stop is not None or len(tokens) == sampling.max_tokens:
                reason: FinishReason = "length"
                if token in self._ends or stop is not None:
                    reason = "stop" if token in self._ends else "stop_string"
                return Answer(tokens, tuple(logprobs), text[:stop], reason, certain)

    def text(self, tokens: Tokens) -> str:
        """Special tokens have no letters."""
        return "".join(self._letters[token] for token in tokens)

    @torch.inference_mode()
    def _behind(self, text: Tokens) -> np.ndarray:
        if text not in self._logits:
            out = self._model(torch.tensor([text]), use_cache=False)
            self._logits[text] = out.logits[0, -1].double().numpy()
        return self._logits[text]

    def _adjusted(self, logits: np.ndarray, prompt: Tokens, answer: Tokens, sampling: Sampling) -> np.ndarray:
        scores = logits.copy()
        for token, bias in sampling.logit_bias:
            scores[token] += bias
        for token in {*prompt, *answer}:
            penalty = sampling.repetition_penalty
            scores[token] *= penalty if scores[token] < 0 else 1 / penalty
        for token, count in Counter(answer).items():
            scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        if len(answer) < sampling.min_tokens:
            scores[list(self._ends)] = -math.inf
        return scores

    def _stop(self, tokens: Tokens, sampling: Sampling) -> int | None:
        """Where the text ends: before the first stop string that a token behind the least length completed."""
        text, barred = self.text(tokens), len(self.text(tokens[: sampling.min_tokens]))
        places = [
            start
            for stop in sampling.stop
            for start in range(len(text) - len(stop) + 1)
            if text[start : start + len(stop)] == stop and start + len(stop) > barred
        ]
        return min(places, default=None)


def _choose(scores: np.ndarray, sampling: Sampling, position: int) -> tuple[int, bool]:
    """The token, and whether no other was within rounding of being it."""
    ordered = np.sort(scores)[::-1]
    if sampling.temperature == 0:
        return int(scores.argmax()), bool(ordered[0] - ordered[1] > ROUNDING)
    certain = True
    if 0 < sampling.top_k < len(scores):
        least, next_best = ordered[sampling.top_k - 1], ordered[sampling.top_k]
        certain &= bool(least - next_best > ROUNDING)
        scores = np.where(scores >= least, scores, -math.inf)
    weights = _softmax(scores / sampling.temperature)
    if sampling.top_p < 1:
        likeliest = np.argsort(-weights)
        mass_before = weights[likeliest].cumsum() - weights[likeliest]
        certain &= bool((np.abs(mass_before - sampling.top_p) > ROUNDING).all())
        weights[likeliest[mass_before >= sampling.top_p]] = 0
    running = weights.cumsum() / weights.sum()
    number = uniform(sampling.seed, position)
    certain &= bool((np.abs(running - number) > ROUNDING).all())
    return int((running <= number).sum()), certain


def _softmax(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()
