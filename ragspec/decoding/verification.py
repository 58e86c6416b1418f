"""Verification: how much of a draft the target would have written itself, and the token it writes next.

Greedy: a draft token stands where it is the target's argmax. Sampling: the target's own token y is drawn from its distribution
p, and a draft token x stands where y = x. That is speculative sampling (Leviathan et al., arXiv 2211.17192, Algorithm 1; Chen
et al., arXiv 2302.01318) for a draft that is certain, q(x) = 1: x stands with probability min(1, p(x) / q(x)) = p(x), and given
that it falls, y has the distribution p without x, renormalised, which is max(p - q, 0). However a drafter came by its tokens,
what is emitted was drawn from p alone. The uniform numbers are a function of (seed, position), so a seeded answer is the same
token for token with any draft, or none.

All of it is numpy on one row at a time: for arrays this small torch's operators would wake threads beside the kernels' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ragspec.decoding.draft import Draft
from ragspec.decoding.request import Sampling

#: How far below the greatest logit the likeliest tokens are looked for, before all of the vocabulary is sorted.
_DEPTHS = (3.0, 6.0, 12.0)


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


def verify_sampled(logits: Tensor, draft: Draft, sampling: Sampling, position: int) -> Verdict:
    """Draw the target's own tokens, row by row, as far as the draft is what is drawn.

    Args:
        logits: what the request samples from, behind the last token and behind each draft token, [k + 1, vocabulary]. Rows
            behind the first draft token that falls are not looked at.
        draft: k tokens.
        sampling: temperature above 0.
        position: of the first token to be emitted, counted from the answer's start.
    """
    accepted = 0
    while True:
        row = logits[accepted].float().cpu().numpy()
        chosen = draw(*support(row, sampling), uniform(sampling.seed, position + accepted))
        if accepted == len(draft.tokens) or draft.tokens[accepted] != chosen:
            return Verdict(accepted, chosen)
        accepted += 1


def support(row: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """What a request samples from: temperature, then top-k, then top-p, as transformers orders them.

    Ties at the k-th value are all kept. Of ties at the border of top-p, those of the lowest numbers are.

    Args:
        row: logits, float32 [vocabulary].
        sampling: temperature above 0.

    Returns:
        tokens, rising, [n]; their weights, of any sum, float32 [n]. No other token can be drawn.
    """
    # Logits that are not finite give weights that are not; the engine ends such an answer by its log-probability.
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = row / np.float32(sampling.temperature)
        top = scaled.max()
        tokens = np.arange(len(scaled))
        if 0 < sampling.top_k < len(scaled):
            tokens = _likeliest(scaled, top, sampling.top_k)
            scaled = scaled[tokens]
        weights = np.exp(scaled - top)
        if sampling.top_p < 1:
            kept = _nucleus(scaled, weights, top, sampling.top_p)
            tokens, weights = tokens[kept], weights[kept]
    return tokens, weights


def _likeliest(scaled: np.ndarray, top: np.float32, count: int) -> np.ndarray:
    """The places of the `count` greatest and of what ties with the last of them, rising."""
    for depth in _DEPTHS:
        near = np.flatnonzero(scaled >= top - np.float32(depth))
        if len(near) >= count:
            values = scaled[near]
            kept: np.ndarray = near[values >= np.partition(values, -count)[-count]]
            return kept
    return np.flatnonzero(~(scaled < np.partition(scaled, -count)[-count]))


def _nucleus(scaled: np.ndarray, weights: np.ndarray, top: np.float32, mass: float) -> np.ndarray:
    """The places before which, from the greatest down, less than `mass` of all weight lies; rising, at least one.

    The greatest are summed in the same order whatever depth was enough, so the depth does not show in the answer.
    """
    enough = mass * weights.sum(dtype=np.float64)
    for depth in (*_DEPTHS, None):
        near = np.arange(len(scaled)) if depth is None else np.flatnonzero(scaled >= top - np.float32(depth))
        falling = near[np.argsort(-scaled[near], kind="stable")]
        running = weights[falling].cumsum(dtype=np.float64)
        if len(running) and running[-1] >= enough:
            break
    kept: np.ndarray = np.sort(falling[: 1 + np.count_nonzero(running[:-1] < enough)])
    return kept


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on nothing but the seed and the position (Philox, counter-based)."""
    return float(np.random.Generator(np.random.Philox(key=[seed, position])).random())


def draw(tokens: np.ndarray, weights: np.ndarray, number: float) -> int:
    """The token at which the running sum of `weights` [n] passes `number` of their total."""
    running = weights.cumsum(dtype=np.float64)
    place = np.searchsorted(running, number * running[-1], side="right")
    # Rounding can land past the end, or on a token of weight 0 behind the last positive one.
    return int(tokens[min(place, np.searchsorted(running, running[-1]))])
