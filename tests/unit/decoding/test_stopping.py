"""Answers end where they would without speculation."""

from __future__ import annotations

from functools import lru_cache

import pytest

from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.decoding.stopping import holds_stop
from ragspec.errors import ConflictError, InputError
from tests import tiny
from tests.unit.decoding import drafters


def answer(request: Request, *, noise: float | None) -> Completion:
    """Decode one request, with a drafter that knows the unstopped answer or with none."""
    target = tiny.target()
    free = Request(request.id, request.prompt, Sampling(max_tokens=request.sampling.max_tokens))
    known = {request.id: tiny.generate(target, free)}
    chosen = [] if noise is None else [drafters.NoisyOracle(known, target.vocabulary, noise=noise)]
    engine = Engine(target, drafters=chosen)
    engine.add(request)
    while engine.has_work:
        for completion in engine.step():
            return completion
    raise AssertionError


@lru_cache
def find_prompt_that_ends(least: int) -> tuple[int, ...]:
    """A prompt after which the tiny model writes its end token, after at least `least` tokens."""
    target = tiny.target()
    for start in range(400):
        prompt = tuple((start * 7 + i * 13) % 256 for i in range(12))
        tokens = tiny.generate(target, Request("x", prompt, Sampling(max_tokens=60)))
        if tokens[-1] == tiny.END and len(tokens) >= least:
            return prompt
    raise AssertionError


@pytest.mark.parametrize("noise", [None, 0.0, 0.3])
def test_an_end_token_inside_a_draft_ends_the_answer(noise: float | None) -> None:
    prompt = find_prompt_that_ends(4)
    request = Request("e", prompt, Sampling(max_tokens=60))
    expected = tiny.generate(tiny.target(), request)

    done = answer(request, noise=noise)

    assert done.acceptance.token_ids == expected
    assert done.finish_reason == "stop"
    assert "<end>" not in done.text


@pytest.mark.parametrize("noise", [None, 0.0, 0.3])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_across_draft_borders_cuts_the_text_before_it(noise: float | None, length: int) -> None:
    prompt = tuple(range(65, 90))
    free = tiny.generate(tiny.target(), Request("x", prompt, Sampling(max_tokens=40)))
    whole = tiny.tokenizer().decode(free, skip_special_tokens=True)
    stop = whole[8 : 8 + length]

    done = answer(Request("s", prompt, Sampling(max_tokens=40, stop=("never seen", stop))), noise=noise)

    assert done.finish_reason == "stop_string"
    assert done.text == whole[: whole.index(stop)]
    assert done.acceptance.token_ids == free[: len(done.acceptance.token_ids)]
    assert stop not in tiny.tokenizer().decode(done.acceptance.token_ids[:-1])


@pytest.mark.parametrize("noise", [None, 0.0])
def test_the_token_limit_is_exact(noise: float | None) -> None:
    prompt = tuple(range(65, 90))
    for limit in range(1, 12):
        request = Request("l", prompt, Sampling(max_tokens=limit))
        done = answer(request, noise=noise)

        assert done.acceptance.token_ids == tiny.generate(tiny.target(), request)


def test_the_window_ends_an_answer_as_a_length() -> None:
    prompt = next(p for p in (tuple(range(i, i + 60)) for i in range(50)) if tiny.END not in _first(p, 4))
    engine = Engine(tiny.target(), context_window=64)
    engine.add(Request("w", prompt, Sampling(max_tokens=500)))
    done = []
    while engine.has_work:
        done += engine.step()

    assert done[0].finish_reason == "length"
    assert done[0].prompt_tokens + done[0].completion_tokens == 64


def _first(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tiny.generate(tiny.target(), Request("f", prompt, Sampling(max_tokens=count)))


def test_a_stop_string_is_found_where_tokens_are_bytes() -> None:
    """The checked tail may begin inside a character."""
    bytewise = tiny.byte_tokenizer()
    tokens = bytewise("\U0001f643\U0001f642")["input_ids"]

    assert len(tokens) == 8
    assert holds_stop(bytewise, tokens, ["\U0001f642"])
    assert not holds_stop(bytewise, tokens[:-1], ["\U0001f642"])
    assert not holds_stop(bytewise, tokens, ["\U0001f641"])


def test_numbers_that_are_not_finite_fail_their_own_request_only() -> None:
    """Not a number in one sequence ends it as an error, and its slot is clean for the next."""
    target = tiny.target()
    engine = Engine(target, max_batch=2)
    good = Request("good", tuple(range(60, 90)), Sampling(max_tokens=40))
    later = Request("later", tuple(range(50, 70)), Sampling(max_tokens=10))
    expected = {r.id: tiny.generate(target, r) for r in (good, later)}
    engine.add(Request("bad", tuple(range(40)), Sampling(max_tokens=40)))
    engine.add(good)
    engine.step()
    keys, _ = engine._cache.read(0, 0, 1, 5)
    keys[:, 2] = float("nan")
    engine.add(later)
    done = {}
    while engine.has_work:
        for completion in engine.step():
            done[completion.request_id] = completion

    assert done["bad"].finish_reason == "error"
    assert done["good"].acceptance.token_ids == expected["good"]
    assert done["later"].acceptance.token_ids == expected["later"]


def test_requests_that_cannot_run_are_refused_by_name() -> None:
    engine = Engine(tiny.target(), context_window=64)

    with pytest.raises(InputError, match="64 tokens; the window holds 64") as raised:
        engine.add(Request("long", tuple([1] * 64)))
    assert raised.value.error_code == "prompt_too_long"
    with pytest.raises(InputError, match="prompt is empty"):
        engine.add(Request("empty", ()))
    with pytest.raises(InputError, match="outside the vocabulary"):
        engine.add(Request("strange", (10**6,)))
    engine.add(Request("twice", (1, 2)))
    with pytest.raises(ConflictError, match="already in the engine"):
        engine.add(Request("twice", (1, 2)))
