"""Penalties, biases and least lengths choose what they would choose without speculation, and what others would choose."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from ragspec.decoding.engine import Engine
from ragspec.decoding.logits import adjust, adjusts
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.errors import InputError
from tests import tiny
from tests.unit.decoding.drafters import NoisyOracle

END = 3


def plainly(logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """The definitions, one token at a time: OpenAI's penalties, CTRL's repetition penalty, vLLM's bar."""
    counts = Counter(answer)
    out = []
    for token, given in enumerate(logits):
        score = given + sum(bias for biased, bias in sampling.logit_bias if biased == token)
        if token in counts or token in prompt:
            score = score * sampling.repetition_penalty if score < 0 else score / sampling.repetition_penalty
        score -= sampling.frequency_penalty * counts[token] + sampling.presence_penalty * (token in counts)
        out.append(-math.inf if token == END and len(answer) < sampling.min_tokens else score)
    return out


@pytest.mark.parametrize("seed", range(40))
def test_each_row_counts_the_draft_tokens_before_it(seed: int) -> None:
    rng = random.Random(seed)
    some = lambda most: [rng.randrange(12) for _ in range(rng.randint(0, most))]  # noqa: E731 - short and used thrice
    prompt, answer, draft = [rng.randrange(12), *some(6)], some(6), some(5)
    sampling = Sampling(
        min_tokens=rng.randint(0, 12),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.7, -1.5]),
        frequency_penalty=rng.choice([0.0, 0.4, -0.2]),
        logit_bias=rng.choice([(), ((5, 2.0), (7, -100.0), (5, 1.0))]),
    )
    logits = torch.randn((len(draft) + 1, 12), generator=torch.Generator().manual_seed(seed))
    untouched = logits.clone()

    ours = adjust(logits, sampling, prompt, answer, draft, frozenset({END}))

    rows = [plainly(row, sampling, prompt, answer + draft[:j]) for j, row in enumerate(logits.tolist())]
    torch.testing.assert_close(ours, torch.tensor(rows))
    torch.testing.assert_close(logits, untouched, rtol=0, atol=0)
    assert adjusts(sampling, len(answer)) or torch.equal(ours, logits)


def decode(requests: Sequence[Request], *, answers: dict[str, tuple[int, ...]] | None) -> dict[str, Completion]:
    """All together, with drafts that often are the given answers, or plainly."""
    target = tiny.target()
    drafters = [] if answers is None else [NoisyOracle(answers, target.vocabulary, noise=0.1)]
    engine = Engine(target, max_batch=5, drafters=drafters)
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_work:
        for completion in engine.step():
            done[completion.request_id] = completion
    return done


def requests(**options: Any) -> list[Request]:
    rng = random.Random(9)
    prompts = [tuple(rng.randrange(256) for _ in range(rng.randint(1, 40))) for _ in range(15)]
    return [Request(str(i), prompt, Sampling(max_tokens=30, **options)) for i, prompt in enumerate(prompts)]


def test_repetition_penalty_and_least_length_write_what_generate_writes() -> None:
    """With drafts, against transformers' own logits processors."""
    target = tiny.target()
    asked = requests(repetition_penalty=1.4, min_tokens=20)
    expected = {}
    target.model.set_attn_implementation("eager")
    for request in asked:
        prompt = torch.tensor([request.prompt])
        processors = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(1.4),
                MinNewTokensLengthLogitsProcessor(prompt.shape[1], 20, tiny.END),
            ]
        )
        out = target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=30,
            do_sample=False,
            logits_processor=processors,
        )
        expected[request.id] = tuple(out[0, prompt.shape[1] :].tolist())
    target.model.set_attn_implementation("ragspec")

    done = decode(asked, answers=expected)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == expected
    assert sum(c.acceptance.num_accepted_draft_tokens for c in done.values()) > 100
    plain = decode(requests(), answers=None)
    assert any(plain[i].acceptance.token_ids != expected[i] for i in expected)


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.6},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.8, "temperature": 0.7, "seed": 4},
        {"logit_bias": ((tiny.END, 100.0),), "min_tokens": 12},
        {"logit_bias": ((40, 6.0), (41, -100.0)), "temperature": 1.0, "top_p": 0.8},
    ],
    ids=str,
)
def test_an_adjusted_answer_is_the_same_with_drafts_and_changes_only_what_is_asked(options: dict[str, Any]) -> None:
    asked = [r if int(r.id) % 2 else replace(r, sampling=Sampling(max_tokens=30)) for r in requests(**options)]
    plain = decode(asked, answers=None)
    answers = {i: c.acceptance.token_ids for i, c in plain.items()}

    done = decode(asked, answers=answers)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == answers
    assert sum(c.acceptance.num_accepted_draft_tokens for c in done.values()) > 50
    unadjusted = {i: c.acceptance.token_ids for i, c in decode(requests(), answers=None).items()}
    assert {i for i in answers if answers[i] != unadjusted[i]} <= {r.id for r in asked if int(r.id) % 2}
    assert any(answers[i] != unadjusted[i] for i in answers)


def test_log_probabilities_are_of_the_target_itself() -> None:
    """A bias decides the token, not its recorded probability."""
    target = tiny.target()
    request = Request("b", tuple(range(20)), Sampling(max_tokens=1, logit_bias=((17, 100.0),)))

    record = decode([request], answers=None)["b"].acceptance

    target.model.set_attn_implementation("eager")
    with torch.inference_mode():
        own = target.model(torch.tensor([request.prompt])).logits[0, -1].log_softmax(-1)
    target.model.set_attn_implementation("ragspec")
    assert record.token_ids == (17,)
    assert record.token_logprobs[0] == pytest.approx(float(own[17]), abs=1e-4)


@pytest.mark.parametrize("draft", [None, 0.0])
def test_a_stop_string_counts_where_it_is_completed_behind_the_least_length(draft: float | None) -> None:
    """As in vLLM: one that lies within the least length is text, one that reaches beyond ends the answer."""
    prompt = tuple(range(65, 90))
    free = tiny.generate(tiny.target(), Request("x", prompt, Sampling(max_tokens=24)))
    whole = tiny.tokenizer().decode(free, skip_special_tokens=True)
    assert tiny.END not in free
    early, straddling = whole[2:4], whole[8:12]
    known = None if draft is None else {"s": free}
    sampling = Sampling(max_tokens=24, min_tokens=10, stop=(early, straddling))

    done = decode([Request("s", prompt, sampling)], answers=known)["s"]

    ends = min(i for i in range(11, 25) if any(whole[:i].endswith(stop) for stop in (early, straddling)))
    assert done.finish_reason == "stop_string"
    assert done.acceptance.token_ids == free[:ends]
    assert whole[:ends] in {done.text + early, done.text + straddling}
    assert early in done.text


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_k": -1},
        {"seed": -1},
        {"min_tokens": 129},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"logit_bias": ((3, 101.0),)},
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))) as raised:
        Sampling(**options)
    assert raised.value.error_code == "bad_option"


def test_a_bias_for_a_token_that_the_target_lacks_is_refused() -> None:
    request = Request("b", (1, 2), Sampling(logit_bias=((tiny.VOCABULARY, 1.0),)))

    with pytest.raises(InputError, match=r"logit_bias names token .*the vocabulary has 258"):
        Engine(tiny.target()).add(request)
