"""Sampling keeps the target's distribution: rejection sampling, tested statistically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft
from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.verification import Verdict, draw, target_probabilities, uniforms, verify_sampled
from tests import tiny
from tests.unit.decoding import drafters

VOCABULARY = 12
TRIALS = 12_000
#: 99.999th percentile of chi-square with 143 degrees of freedom (pairs of 12 tokens): seeds are fixed, so this never flakes.
LIMIT_PAIRS = 228.0


def two_steps(context: int | None) -> torch.Tensor:
    """A target with memory: its distribution depends on the token before."""
    generator = torch.Generator().manual_seed(17 if context is None else 100 + context)
    return torch.softmax(2 * torch.randn(VOCABULARY, generator=generator), -1)


def proposal(context: int | None) -> torch.Tensor:
    """A drafter's distribution, unlike the target's."""
    generator = torch.Generator().manual_seed(900 if context is None else 500 + context)
    return torch.softmax(1.5 * torch.randn(VOCABULARY, generator=generator), -1)


def write_pair(seed: int, *, certain: bool, verify=verify_sampled) -> tuple[int, int]:
    """Two tokens through one or two verify steps; drafts come from `proposal`, or are copies (certain)."""
    chooser = 10_000_000 + seed
    tokens: list[int] = []
    while len(tokens) < 2:
        before = tokens[-1] if tokens else None
        drafted, rows, beliefs = [], [two_steps(before)], []
        context = before
        for place in range(2 - len(tokens) - 1 + 1):
            belief = proposal(context)
            token = draw(belief, uniforms(chooser, len(tokens) * 10 + place)[0])
            drafted.append(token)
            beliefs.append(belief)
            rows.append(two_steps(token))
            context = token
        draft = Draft(tuple(drafted), (Source.HEAD,) * len(drafted), None if certain else torch.stack(beliefs))
        verdict = verify(torch.stack(rows), draft, seed, len(tokens))
        tokens += [*drafted[: verdict.accepted], verdict.following]
    return tokens[0], tokens[1]


def chi_square(pairs: Counter[tuple[int, int]]) -> float:
    """Distance of counted pairs from what the target alone gives."""
    total = sum(pairs.values())
    first = two_steps(None)
    distance = 0.0
    for a in range(VOCABULARY):
        second = two_steps(a)
        for b in range(VOCABULARY):
            expected = total * float(first[a] * second[b])
            distance += (pairs[a, b] - expected) ** 2 / expected
    return distance


@pytest.mark.parametrize("certain", [True, False], ids=["copied drafts", "sampled drafts"])
def test_pairs_are_distributed_as_the_targets(certain: bool) -> None:
    """Joint distribution of two tokens over drafts that are accepted, refused and corrected."""
    pairs = Counter(write_pair(seed, certain=certain) for seed in range(TRIALS))

    assert chi_square(pairs) < LIMIT_PAIRS


def _accept_too_much(probabilities: torch.Tensor, draft: Draft, seed: int, position: int) -> Verdict:
    """A plausible mistake: compares p with q but redraws from p, not from max(p - q, 0)."""
    assert draft.probabilities is not None
    for place, token in enumerate(draft.tokens):
        uniform, second = uniforms(seed, position + place)
        if second * float(draft.probabilities[place][token]) >= float(probabilities[place][token]):
            return Verdict(place, draw(probabilities[place], uniform))
    return Verdict(len(draft.tokens), draw(probabilities[-1], uniforms(seed, position + len(draft.tokens))[0]))


def test_the_statistic_sees_a_biased_verification() -> None:
    """The test above has the power it claims."""
    pairs = Counter(write_pair(seed, certain=False, verify=_accept_too_much) for seed in range(TRIALS))

    assert chi_square(pairs) > 2 * LIMIT_PAIRS


class SampledOracle(drafters.Quiet):
    """Drafts sampled from a fixed distribution of its own, probabilities given."""

    name = "sampled"

    def __init__(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self._belief = torch.softmax(torch.randn(vocabulary, generator=generator), -1)
        self._calls = 0

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        drafts = {}
        for request_id, limit in limits.items():
            self._calls += 1
            tokens = tuple(draw(self._belief, uniforms(77, self._calls * 64 + i)[0]) for i in range(limit))
            drafts[request_id] = Draft(tokens, (Source.HEAD,) * limit, self._belief.expand(limit, -1).clone())
        return drafts


@pytest.mark.parametrize("drafting", [True, False], ids=["sampled drafts", "no drafts"])
def test_the_engine_samples_the_targets_second_token(drafting: bool) -> None:
    """Through the whole engine: the second token's distribution, summed over the first, at temperature 1.5 and top-k 6."""
    target = tiny.target()
    prompt = tuple(range(40, 60))
    settings = {"temperature": 1.5, "top_k": 6, "max_tokens": 3}
    engine = Engine(target, max_batch=32, drafters=[SampledOracle(target.vocabulary)] if drafting else [])
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
            first = target_probabilities(target.model(torch.tensor([prompt])).logits[0, -1:], sampling)[0]
            out: dict[int, float] = {}
            for token in first.nonzero().flatten().tolist():
                if token in target.eos_ids:
                    out[-1] = out.get(-1, 0.0) + float(first[token])
                    continue
                logits = target.model(torch.tensor([[*prompt, token]])).logits[0, -1:]
                second = target_probabilities(logits, sampling)[0]
                for follower in second.nonzero().flatten().tolist():
                    out[follower] = out.get(follower, 0.0) + float(first[token] * second[follower])
    finally:
        target.model.set_attn_implementation("ragspec")
    return out


def test_a_seeded_answer_is_the_same_with_any_copied_draft() -> None:
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


def test_top_p_and_top_k_match_transformers() -> None:
    """The same filters in the same order as `generate`'s logits processors."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(3)) * 3
    expected = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(40), TopPLogitsWarper(0.85)):
        expected = warper(None, expected)

    ours = target_probabilities(logits, Sampling(temperature=0.7, top_k=40, top_p=0.85))

    torch.testing.assert_close(ours, expected.softmax(-1))
