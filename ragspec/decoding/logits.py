"""What a request does to the target's logits before a token is chosen: bias, penalties, barred end tokens.

Under speculation the row behind the j-th draft token stands for a text that holds the draft tokens before it, so it is
adjusted as if they had been written: row j counts prompt, answer and the first j draft tokens. Rows behind a draft token that
falls are never looked at. Hence an adjusted answer is the same with any draft or none.

The order is vLLM's and transformers': bias, repetition penalty, frequency and presence penalty, then the bar, all in float32,
before temperature. The record's log-probabilities are taken from the logits as the target gave them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ragspec.decoding.request import Sampling


def adjusts(sampling: Sampling, written: int) -> bool:
    """Whether a request changes the logits of its next token, `written` tokens into its answer."""
    return _penalizes(sampling) or bool(sampling.logit_bias) or written < sampling.min_tokens


def adjust(
    logits: Tensor,
    sampling: Sampling,
    prompt: Sequence[int],
    answer: Sequence[int],
    draft: Sequence[int],
    end_tokens: Collection[int],
) -> Tensor:
    """The logits that a request chooses from.

    Args:
        logits: the target's, behind the newest token and behind each draft token, [k + 1, vocabulary]; left as they are.
        sampling: what the request asks.
        prompt: its tokens.
        answer: its tokens emitted so far.
        draft: k tokens proposed to follow.
        end_tokens: what `min_tokens` bars.

    Returns:
        float32 [k + 1, vocabulary].
    """
    scores = logits.to(torch.float32, copy=True)
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        scores.index_add_(1, _index(tokens, scores), scores.new_tensor(biases).expand(len(scores), -1))
    if _penalizes(sampling):
        _penalize(scores, sampling, prompt, answer, draft)
    barred = sampling.min_tokens - len(answer)
    if barred > 0 and end_tokens:
        scores[:barred].index_fill_(1, _index(end_tokens, scores), float("-inf"))
    return scores


def _penalizes(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _penalize(
    scores: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], draft: Sequence[int]
) -> None:
    """Penalise in place. Only the columns of tokens that occur are touched: some hundreds of a vocabulary of thousands."""
    occurring, places = torch.unique(torch.tensor([*prompt, *answer, *draft]), return_inverse=True)
    in_prompt, in_answer, in_draft = places.split([len(prompt), len(answer), len(draft)])
    # Row j has the first j draft tokens behind it: [k + 1, occurring].
    drafted = torch.zeros((len(draft) + 1, len(occurring)), dtype=torch.long)
    drafted[1:] = one_hot(in_draft, len(occurring)).cumsum(0)
    written = (torch.bincount(in_answer, minlength=len(occurring)) + drafted).to(scores.device)
    seen = written + torch.bincount(in_prompt, minlength=len(occurring)).to(scores.device) > 0
    occurring = occurring.to(scores.device)
    values = scores[:, occurring]
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        values = torch.where(seen, torch.where(values < 0, values * penalty, values / penalty), values)
    values = values - sampling.frequency_penalty * written - sampling.presence_penalty * (written > 0)
    scores[:, occurring] = values


def _index(tokens: Collection[int], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), device=like.device)
