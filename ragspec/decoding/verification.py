"""Verification: how much of a draft the target would have written itself, and the token it writes next.

Greedy: a draft token stands where it is the target's argmax. Sampling: speculative sampling (Leviathan et al., arXiv
2211.17192, Algorithm 1; Chen et al., arXiv 2302.01318): a draft token x drawn from q stands with probability
min(1, p(x) / q(x)); where it falls, the next token is drawn from max(p - q, 0), renormalised. The output's distribution is p.

A draft token that was certain (copied) has q(x) = 1. Then drawing the target's own token y ~ p and letting the draft stand
where y = x is the same rule: it stands with probability p(x), and given that it falls, y has the distribution p without x,
renormalised, which is max(p - q, 0). It has a virtue: y does not depend on the draft. The uniform numbers are a function of
(seed, position) alone, so a seeded answer is the same token for token with any copied draft, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragspec.decoding.draft import Draft
from ragspec.decoding.request import Sampling


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verify step emits for one sequence.

    Attributes:
        accepted: draft tokens that stand.
        following: the target's own token behind them: bonus token, or correction of the first draft token that fell.
    """

    accepted: int
    following: int


def verify_greedy(choices: Sequence[int], draft: Draft) -> Verdict:
    """Accept the draft as far as it is the target's own greedy choice.

    Args:
        choices: the target's argmax behind the last token and behind each draft token, [k + 1].
        draft: k tokens.
    """
    accepted = 0
    while accepted < len(draft.tokens) and draft.tokens[accepted] == choices[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


def verify_sampled(probabilities: Tensor, draft: Draft, seed: int, position: int) -> Verdict:
    """Accept the draft so that what is emitted is distributed as the target's.

    Args:
        probabilities: the target's distribution behind the last token and behind each draft token, [k + 1, vocabulary].
        draft: k tokens.
        seed: the request's.
        position: of the first token to be emitted, counted from the answer's start.
    """
    proposals = None if draft.probabilities is None else draft.probabilities.to(probabilities)
    for place, token in enumerate(draft.tokens):
        target = probabilities[place]
        uniform, second = uniforms(seed, position + place)
        if proposals is None:
            chosen = draw(target, uniform)
            if chosen != token:
                return Verdict(place, chosen)
            continue
        proposal = proposals[place]
        if second * float(proposal[token]) >= float(target[token]):
            residual = (target - proposal).clamp_min(0)
            # p = q up to rounding leaves nothing to draw from; then p itself is the right distribution.
            return Verdict(place, draw(residual if float(residual.sum()) > 0 else target, uniform))
    last = len(draft.tokens)
    uniform, _ = uniforms(seed, position + last)
    return Verdict(last, draw(probabilities[last], uniform))


def target_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that a request samples from: temperature, then top-k, then top-p, as transformers orders them.

    Args:
        logits: [r, vocabulary].
        sampling: temperature above 0.

    Returns:
        float32 [r, vocabulary], rows sum to 1.
    """
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, places = scaled.sort(dim=-1)
        below = ordered.softmax(-1).cumsum(-1)
        drop = below <= 1 - sampling.top_p
        drop[..., -1] = False
        scaled = scaled.masked_fill(drop.scatter(-1, places, drop), float("-inf"))
    return scaled.softmax(-1)


def uniforms(seed: int, position: int) -> tuple[float, float]:
    """Two uniform numbers in [0, 1) that depend on nothing but the seed and the position (Philox, counter-based)."""
    first, second = np.random.Generator(np.random.Philox(key=[seed, position])).random(2)
    return float(first), float(second)


def draw(weights: Tensor, uniform: float) -> int:
    """The token at which the running sum of `weights` [vocabulary] passes `uniform` of their total."""
    running = weights.double().cumsum(0)
    token = int(torch.searchsorted(running, uniform * running[-1], right=True))
    # Rounding can land on or past the end, or on a token of weight 0 behind the last positive one.
    last = int(weights.nonzero()[-1])
    return min(token, last)
