"""Sampling keeps the target's distribution, whatever the drafts: by statistics, and beside transformers' own filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft
from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.verification import Verdict, draw, support, uniform, verify_sampled
from tests import tiny
from tests.unit.decoding import drafters

VOCABULARY = 12
TRIALS = 6_000
#: 99.999th percentile of chi-square with 143 degrees of freedom (pairs of 12 tokens): seeds are fixed, so this never flakes.
LIMIT_PAIRS = 228.0


@cache
def target_logits(context: int | None) -> torch.Tensor:
    """A target with memory: its logits depend on the token before."""
    generator = torch.Generator().manual_seed(17 if context is None else 100 + context)
    return 2 * torch.randn(VOCABULARY, generator=generator)


def reference(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities by transformers' own logits processors, in the order of `generate`, of rows [r, vocabulary]."""
    scores = logits.float()
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)


def probabilities(row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    tokens, weights = support(row.numpy(), sampling)
    out = torch.zeros(len(row))
    out[tokens] = torch.from_numpy(weights / weights.sum())
    return out


def write_pair(seed: int, sampling: Sampling, right: int, verify=verify_sampled) -> tuple[int, int]:
    """Two tokens through one or two verify steps; the first `right` tokens of a draft are the target's likeliest."""
    sampling = replace(sampling, seed=seed)
    tokens: list[int] = []
    while len(tokens) < 2:
        context = tokens[-1] if tokens else None
        drafted, rows = [], [target_logits(context)]
        for place in range(2 - len(tokens)):
            order = rows[-1].argsort(descending=True)
            drafted.append(int(order[0 if place < right else 3]))
            rows.append(target_logits(drafted[-1]))
        draft = Draft(tuple(drafted), (Source.HEAD,) * len(drafted))
        verdict = verify(torch.stack(rows), draft, sampling, len(tokens))
        tokens += [*drafted[: verdict.accepted], verdict.following]
    return tokens[0], tokens[1]


def chi_square(pairs: Counter[tuple[int, int]], sampling: Sampling) -> float:
    """Distance of counted pairs from what the target alone gives; infinite where one cannot occur."""
    total = sum(pairs.values())
    first = reference(target_logits(None)[None], sampling)[0]
    distance = 0.0
    for a in range(VOCABULARY):
        second = reference(target_logits(a)[None], sampling)[0]
        for b in range(VOCABULARY):
            expected = total * float(first[a] * second[b])
            if expected:
                distance += (pairs[a, b] - expected) ** 2 / expected
            elif pairs[a, b]:
                return float("inf")
    return distance


FILTERS = {
    "temperature": Sampling(temperature=1.2),
    "top-k": Sampling(temperature=1.2, top_k=6),
    "top-p": Sampling(temperature=1.2, top_p=0.9),
    "both": Sampling(temperature=1.2, top_k=8, top_p=0.9),
}


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("right", [0, 1, 2], ids=["wrong drafts", "partly right", "right drafts"])
def test_pairs_are_distributed_as_the_targets(sampling: Sampling, right: int) -> None:
    """Joint distribution of two tokens over drafts that are accepted, refused and corrected."""
    pairs = Counter(write_pair(seed, sampling, right) for seed in range(TRIALS))

    assert chi_square(pairs, sampling) < LIMIT_PAIRS


def _redraw(logits: torch.Tensor, draft: Draft, sampling: Sampling, position: int) -> Verdict:
    """A plausible mistake: where the draft falls, the next token is drawn anew."""
    verdict = verify_sampled(logits, draft, sampling, position)
    if verdict.accepted == len(draft.tokens):
        return verdict
    again = draw(*support(logits[verdict.accepted].numpy(), sampling), uniform(sampling.seed, 1000 + position))
    return Verdict(verdict.accepted, again)


def test_the_statistic_sees_a_biased_verification() -> None:
    """The test above has the power it claims."""
    sampling = FILTERS["temperature"]
    pairs = Counter(write_pair(seed, sampling, 2, verify=_redraw) for seed in range(TRIALS))

    assert chi_square(pairs, sampling) > 2 * LIMIT_PAIRS


class FixedOracle(drafters.Quiet):
    """Drafts drawn from a fixed distribution of its own."""

    name = "sampled"

    def __init__(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self._belief = torch.softmax(torch.randn(vocabulary, generator=generator), -1).numpy()
        self._calls = 0

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        drafts = {}
        for request_id, limit in limits.items():
            self._calls += 1
            tokens = tuple(
                draw(np.arange(len(self._belief)), self._belief, uniform(77, self._calls * 64 + i))
                for i in range(limit)
            )
            drafts[request_id] = Draft(tokens, (Source.HEAD,) * limit)
        return drafts


@pytest.mark.parametrize("drafting", [True, False], ids=["sampled drafts", "no drafts"])
def test_the_engine_samples_the_targets_second_token(drafting: bool) -> None:
    """Through the whole engine: the second token's distribution, summed over the first, at temperature 1.5 and top-k 6."""
    target = tiny.target()
    prompt = tuple(range(40, 60))
    settings = {"temperature": 1.5, "top_k": 6, "max_tokens": 3}
    engine = Engine(target, max_batch=32, drafters=[FixedOracle(target.vocabulary)] if drafting else [])
    trials = 3000
    for seed in range(trials):
        engine.add(Request(str(seed), prompt, Sampling(seed=seed, **settings)))
    counts: Counter[int] = Counter()
    while engine.has_work:
        for completion in engine.step():
            ids = completion.acceptance.token_ids
            counts[ids[1] if len(ids) > 1 else -1] += 1

    expected = exact_second_token(target, prompt, Sampling(**settings))
    distance = 0.0
    cells = 0
    for token, probability in expected.items():
        if probability * trials >= 5:
            distance += (counts[token] - probability * trials) ** 2 / (probability * trials)
            cells += 1
    assert cells >= 8
    # 99.999th percentile of chi-square lies below cells + 4.3 sqrt(2 cells) + 13 for these sizes.
    assert distance < cells + 4.3 * (2 * cells) ** 0.5 + 13
    assert set(counts) <= set(expected)


def exact_second_token(target, prompt: Sequence[int], sampling: Sampling) -> dict[int, float]:
    """By enumeration of the first token, on transformers' own attention."""
    target.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            first = reference(target.model(torch.tensor([prompt])).logits[0, -1:], sampling)[0]
            out: dict[int, float] = {}
            for token in first.nonzero().flatten().tolist():
                if token in target.eos_ids:
                    out[-1] = out.get(-1, 0.0) + float(first[token])
                    continue
                logits = target.model(torch.tensor([[*prompt, token]])).logits[0, -1:]
                second = reference(logits, sampling)[0]
                for follower in second.nonzero().flatten().tolist():
                    out[follower] = out.get(follower, 0.0) + float(first[token] * second[follower])
    finally:
        target.model.set_attn_implementation("ragspec")
    return out


def test_a_seeded_answer_is_the_same_with_any_draft() -> None:
    """The noise belongs to (seed, position): batch, drafts and neighbours do not change a sampled answer."""
    target = tiny.target()
    requests = [
        Request(f"s{i}", tuple(range(i, i + 30)), Sampling(max_tokens=25, temperature=0.8, top_p=0.9, seed=i))
        for i in range(20)
    ]
    plain = {}
    for request in requests:
        engine = Engine(target, max_batch=1, drafters=[])
        engine.add(request)
        while engine.has_work:
            for completion in engine.step():
                plain[completion.request_id] = completion.acceptance.token_ids
    oracle = drafters.NoisyOracle(plain, target.vocabulary)
    engine = Engine(target, max_batch=7, drafters=[oracle])
    for request in requests:
        engine.add(request)
    together = {}
    accepted = 0
    while engine.has_work:
        for completion in engine.step():
            together[completion.request_id] = completion.acceptance.token_ids
            accepted += completion.acceptance.num_accepted_draft_tokens

    assert together == plain
    assert accepted > 50


def test_a_vanishing_temperature_is_greedy() -> None:
    target = tiny.target()
    request = Request("g", tuple(range(20)), Sampling(max_tokens=12))
    engine = Engine(target)
    engine.add(Request("g", request.prompt, Sampling(max_tokens=12, temperature=1e-40)))
    done = []
    while engine.has_work:
        done += engine.step()

    assert done[0].acceptance.token_ids == tiny.generate(target, request)


@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0, 20.0], ids=["flat", "wide", "usual", "sharp"])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 1.0), (0, 0.85), (40, 0.85), (0, 0.999), (1, 0.5)])
def test_top_p_and_top_k_match_transformers(spread: float, top_k: int, top_p: float) -> None:
    """The same filters in the same order as `generate`'s logits processors, whichever depth is enough."""
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(3)) * spread
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)

    ours = torch.stack([probabilities(row, sampling) for row in logits])

    torch.testing.assert_close(ours, reference(logits, sampling))


def test_ties_at_the_kth_value_are_all_kept() -> None:
    tokens, _ = support(np.array([1, 2, 0, 1, 1], dtype=np.float32), Sampling(temperature=1.0, top_k=2))

    assert tokens.tolist() == [0, 1, 3, 4]


def test_of_ties_at_the_border_of_top_p_the_lowest_numbers_are_kept() -> None:
    """0.2 of the mass each: half of it are the first three, wherever the others stand."""
    tokens, weights = support(np.zeros(5, dtype=np.float32), Sampling(temperature=1.0, top_p=0.5))

    assert tokens.tolist() == [0, 1, 2]
    assert len(set(weights.tolist())) == 1

    row = np.array([0, 5, 0, 0, -50, 0], dtype=np.float32)
    assert support(row, Sampling(temperature=1.0, top_p=0.98))[0].tolist() == [0, 1]


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_some_logits_that_are_not_finite_draws_some_token(sampling: Sampling, value: float) -> None:
    for place in range(VOCABULARY):
        row = target_logits(None).clone()
        row[place] = value
        drawn = verify_sampled(row[None], Draft(), sampling, 0).following
        assert 0 <= drawn < VOCABULARY
        assert value != float("-inf") or drawn != place


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_draw_some_token(sampling: Sampling, value: float) -> None:
    """The engine ends the answer by the token's log-probability; until then nothing may raise."""
    assert 0 <= verify_sampled(torch.full((1, VOCABULARY), value), Draft(), sampling, 0).following < VOCABULARY
