"""Prefix reuse, preemption and the order of work change no token."""

from __future__ import annotations

import contextlib
import dis
import random
from dataclasses import replace
from typing import Any

import pytest

from ragspec.decoding import engine as engine_module
from ragspec.decoding.engine import Engine
from ragspec.decoding.lookup import OwnTextDrafter
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.decoding.scheduler import MAX_PREEMPTIONS
from ragspec.decoding.sequence import Emission, Sequence
from tests import tiny
from tests.unit.decoding import drafters
from tests.unit.decoding.test_greedy_exactness import check_record


def make_requests(count: int, seed: int) -> list[Request]:
    """Prompts out of few passages, in every order, so that they share prefixes of many lengths."""
    rng = random.Random(seed)
    passages = [tuple(rng.randrange(256) for _ in range(rng.randint(5, 60))) for _ in range(4)]
    requests = []
    for i in range(count):
        chosen = rng.sample(passages, rng.randint(1, 3))
        question = tuple(rng.randrange(256) for _ in range(rng.randint(0, 9)))
        prompt = (1, 2, 3, *(token for passage in chosen for token in passage), *question)
        urgent = rng.random() < 0.3
        requests.append(Request(f"r{i}", prompt, Sampling(max_tokens=rng.randint(1, 24)), interactive=urgent))
    return requests


def run(
    engine: Engine, requests: list[Request], cancel: set[str] = frozenset(), seed: int = 0
) -> dict[str, Completion]:
    """Feed requests a few at a time and cancel some on the way."""
    rng = random.Random(seed)
    pending, doomed = list(requests), sorted(cancel)
    done: dict[str, Completion] = {}
    while pending or engine.has_work:
        for _ in range(rng.randint(0, 3)):
            if pending:
                engine.add(pending.pop(0))
        if doomed and rng.random() < 0.3:
            engine.cancel(doomed.pop())
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


@pytest.mark.parametrize(
    ("max_batch", "prefill_chunk", "prefix_cache"), [(1, 7, 0.1), (3, 20, 0.1), (5, 64, 0.1), (3, 20, 0)]
)
def test_shared_prefixes_preemption_and_cancelled_donors_change_no_token(
    max_batch: int, prefill_chunk: int, prefix_cache: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks, few slots, donors that leave in mid-prompt: the answers are the target's, the records add up."""
    monkeypatch.setattr("ragspec.decoding.memory.KEEPING_PER_WORKING", 1)
    target = tiny.target()
    requests = make_requests(60, seed=max_batch)
    expected = {r.id: tiny.generate(target, r) for r in requests}
    oracle = drafters.NoisyOracle(expected, target.vocabulary)
    engine = Engine(
        target,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        drafters=[oracle, OwnTextDrafter()],
        prefix_cache=prefix_cache,
    )
    cancelled = {r.id for r in requests[::7]}

    done = run(engine, requests, cancelled)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == {i: expected[i] for i in done}
    assert set(expected) - set(done) <= cancelled
    assert engine.drafter_failures == 0
    for completion in done.values():
        check_record(completion)
    hits = sum(c.cached_prompt_tokens for c in done.values())
    assert engine.prefix_hit_tokens >= hits
    if prefix_cache:
        assert hits > 0.2 * sum(c.prompt_tokens for c in done.values())
    else:
        assert hits == engine.prefix_hit_tokens == 0


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_a_sliding_window_shares_prefixes_too(family: str) -> None:
    target = tiny.target(family)
    requests = make_requests(15, seed=4)
    expected = {r.id: tiny.generate(target, r) for r in requests}
    engine = Engine(target, max_batch=3, prefill_chunk=40)

    done = run(engine, requests)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == expected
    assert engine.prefix_hit_tokens > 0


def test_a_sampled_answer_survives_preemption() -> None:
    """Its random numbers go on at the position where it was interrupted."""
    target = tiny.target()
    bulk = Request("bulk", tuple(range(40)), Sampling(max_tokens=30, temperature=1.0, seed=5))
    alone = run(Engine(target), [bulk])["bulk"]
    engine = Engine(target, max_batch=1)
    engine.add(bulk)
    done: dict[str, Completion] = {}
    for step in range(1000):
        if step in {3, 6}:
            engine.add(Request(f"urgent-{step}", tuple(range(90, 120)), Sampling(max_tokens=2), interactive=True))
        done |= {completion.request_id: completion for completion in engine.step()}
        if not engine.has_work:
            break

    assert list(done) == ["urgent-3", "urgent-6", "bulk"]
    assert done["bulk"].acceptance.token_ids == alone.acceptance.token_ids
    check_record(done["bulk"])


def test_prompts_that_share_a_prefix_are_computed_one_after_the_other() -> None:
    """Of four prompts added together, three copy what the first computes."""
    target = tiny.target()
    prefix = tuple(range(100))
    requests = [Request(f"r{i}", (*prefix, 200 + i), Sampling(max_tokens=3)) for i in range(4)]

    done = run(Engine(target, max_batch=4), requests)

    assert sorted(c.cached_prompt_tokens for c in done.values()) == [0, 100, 100, 100]
    assert {i: c.acceptance.token_ids for i, c in done.items()} == {r.id: tiny.generate(target, r) for r in requests}


class Failing:
    """A target whose first forward pass raises before it has computed anything."""

    def __init__(self, target: Any, error: BaseException) -> None:
        self._target = target
        self._errors = [error]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, *given: Any, **options: Any) -> Any:
        if self._errors:
            raise self._errors.pop()
        return self._target.forward(*given, **options)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["memory", "ctrl-c"])
def test_after_a_step_that_failed_nobody_copies_what_it_was_to_compute(error: BaseException) -> None:
    """Who comes then is urgent: it is served before the failed step's own prompt is tried again."""
    target = tiny.target()
    first = Request("first", tuple(range(100)), Sampling(max_tokens=8))
    second = replace(first, id="second", prompt=(*first.prompt, 7), interactive=True)
    engine = Engine(Failing(target, error), max_batch=2)
    engine.add(first)
    with pytest.raises(type(error)):
        engine.step()

    done = run(engine, [second])

    assert {i: c.acceptance.token_ids for i, c in done.items()} == {
        r.id: tiny.generate(target, r) for r in (first, second)
    }


def test_what_ended_before_a_step_failed_is_given_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two sequences' tokens: one has ended, the other has emitted nothing."""
    target = tiny.target()
    requests = [
        Request(name, (*tuple(range(40, 60)), place), Sampling(max_tokens=6)) for place, name in enumerate("ab")
    ]
    engine = Engine(target, max_batch=2)
    take, interruptions = Sequence.take, [KeyboardInterrupt()]

    def interrupted(sequence: Sequence, emission: Emission) -> None:
        take(sequence, emission)
        if emission.finish_reason is not None and interruptions:
            raise interruptions.pop()

    monkeypatch.setattr(Sequence, "take", interrupted)
    for request in requests:
        engine.add(request)
    done: list[Completion] = []
    while engine.has_work:
        with contextlib.suppress(KeyboardInterrupt):
            done += engine.step()

    assert not interruptions
    assert {c.request_id: c.acceptance.token_ids for c in done} == {r.id: tiny.generate(target, r) for r in requests}
    assert len(done) == 2


def test_where_looking_for_a_stop_fails_no_end_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look fails the first time: at a token that completes the stop string too."""
    target = tiny.target()
    free = Request("free", tuple(range(40, 60)), Sampling(max_tokens=12))
    whole = run(Engine(target), [free])["free"].text
    stopped = replace(free, id="stopped", sampling=replace(free.sampling, stop=(whole[4:6],)))
    expected = run(Engine(target), [stopped])["stopped"]
    look, looked = engine_module.holds_stop, set()

    def stumbling(tokenizer: Any, tokens: list[int], *rest: Any) -> bool:
        if len(tokens) not in looked:
            looked.add(len(tokens))
            raise RuntimeError("Already borrowed")
        return look(tokenizer, tokens, *rest)

    monkeypatch.setattr(engine_module, "holds_stop", stumbling)
    engine = Engine(target)
    engine.add(stopped)
    done: list[Completion] = []
    while engine.has_work:
        with contextlib.suppress(RuntimeError):
            done += engine.step()

    assert expected.finish_reason == "stop_string"
    assert [(c.text, c.finish_reason, c.acceptance.token_ids) for c in done] == [
        (expected.text, expected.finish_reason, expected.acceptance.token_ids)
    ]
    check_record(done[0])


def test_a_sequence_takes_all_of_a_step_or_nothing() -> None:
    """CPython handles a signal behind calls and backward jumps only, and there are none."""
    names = [instruction.opname for instruction in dis.get_instructions(Sequence.take)]

    assert [name for name in names if "CALL" in name or "BACKWARD" in name or name == "FOR_ITER"] == []


def test_the_last_prompt_token_is_always_computed() -> None:
    """A prompt that is cached whole still needs the logits behind its end."""
    engine = Engine(tiny.target(), max_batch=1)
    first, second = (run(engine, [Request(name, tuple(range(50)), Sampling(max_tokens=5))])[name] for name in "ab")

    assert (first.cached_prompt_tokens, second.cached_prompt_tokens) == (0, 49)
    assert first.acceptance.token_ids == second.acceptance.token_ids
    assert (engine.prompt_tokens, engine.prefix_hit_tokens) == (100, 49)


def test_a_bulk_request_gives_way_a_bounded_number_of_times() -> None:
    """Whenever it runs, somebody urgent comes; from the fourth time on they wait for it."""
    engine = Engine(tiny.target(), max_batch=1, max_draft=0)
    engine.add(Request("bulk", tuple(range(30)), Sampling(max_tokens=12)))
    order: list[str] = []
    step = 0
    while engine.has_work:
        order += [completion.request_id for completion in engine.step()]
        step += 1
        if "bulk" in engine._scheduler.running:
            engine.add(Request(f"urgent-{step}", (1, 2, 3), Sampling(max_tokens=1), interactive=True))

    assert order.index("bulk") == MAX_PREEMPTIONS


def test_the_bulk_request_with_the_least_done_gives_way_and_comes_back_first() -> None:
    engine = Engine(tiny.target(), max_batch=2, max_draft=0)
    engine.add(Request("old", tuple(range(60)), Sampling(max_tokens=12)))
    engine.step()
    engine.add(Request("young", tuple(range(100, 130)), Sampling(max_tokens=12)))
    engine.add(Request("next", tuple(range(130, 150)), Sampling(max_tokens=12)))
    engine.step()
    engine.add(Request("urgent", (1, 2, 3), Sampling(max_tokens=2), interactive=True))
    engine.step()
    running = set(engine._scheduler.running)
    order = []
    while engine.has_work:
        order += [completion.request_id for completion in engine.step()]

    assert running == {"old", "urgent"}
    assert order == ["urgent", "old", "young", "next"]


def test_cancelling_a_preempted_request_forgets_it() -> None:
    """Its drafters too."""
    lookup = OwnTextDrafter()
    engine = Engine(tiny.target(), max_batch=1, drafters=[lookup])
    engine.add(Request("bulk", tuple(range(30)), Sampling(max_tokens=8)))
    engine.step()
    engine.add(Request("urgent", (1, 2, 3), Sampling(max_tokens=2), interactive=True))
    engine.step()
    engine.cancel("bulk")
    while engine.has_work:
        engine.step()

    assert lookup._texts == {}


def test_where_one_answer_cannot_be_written_none_that_ended_with_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target("llama")
    engine = Engine(target, max_batch=3)
    requests = [Request(f"r{i}", (1, 2, 3 + i), Sampling(max_tokens=1)) for i in range(3)]
    write, written = engine_module.answer_text, []

    def stumbling(*arguments: Any) -> str:
        written.append(arguments)
        if len(written) == 2:
            raise RuntimeError("the tokenizer is in use")
        return write(*arguments)

    monkeypatch.setattr(engine_module, "answer_text", stumbling)
    for request in requests:
        engine.add(request)

    with pytest.raises(RuntimeError, match="in use"):
        engine.step()

    assert [completion.request_id for completion in engine.step()] == ["r0", "r1", "r2"]
    assert not engine.has_work


@pytest.mark.parametrize("chunk", [0, -1])
def test_an_engine_that_could_read_no_prompt_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match="prefill_chunk"):
        Engine(tiny.target("llama"), prefill_chunk=chunk)


def test_a_drafter_hears_the_end_of_those_requests_only_whose_beginning_it_heard() -> None:
    class Strict(OwnTextDrafter):
        def end(self, request_id: str) -> None:
            del self._texts[request_id]

    engine = Engine(tiny.target("llama"), max_batch=1, drafters=[Strict()])
    for name, speculation in (("drafts", True), ("plain", False), ("cancelled", True)):
        engine.add(Request(name, (1, 2, 3), Sampling(max_tokens=2, speculation=speculation)))
    engine.cancel("cancelled")
    while engine.has_work:
        engine.step()

    assert engine.drafter_failures == 0
