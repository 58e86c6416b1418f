"""Greedy output is the target's own, token for token, whatever the batch and the drafter."""

from __future__ import annotations

import random

import pytest

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Drafter
from ragspec.decoding.engine import Engine
from ragspec.decoding.lookup import OwnTextDrafter
from ragspec.decoding.request import Completion, Request, Sampling
from tests import tiny
from tests.unit.decoding import drafters
from tests.unit.decoding.records import check_record


def make_requests(count: int, seed: int) -> list[Request]:
    """Prompts of 1 to 150 tokens, half of them repetitive so that lookup has something to copy."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        length = rng.randint(1, 150)
        phrase = [rng.randrange(256) for _ in range(rng.randint(1, 12))]
        prompt = [rng.randrange(256) for _ in range(length)] if i % 2 else (phrase * length)[:length]
        requests.append(Request(f"r{i}", tuple(prompt), Sampling(max_tokens=rng.randint(1, 50))))
    return requests


def run(engine: Engine, requests: list[Request], seed: int = 0) -> dict[str, Completion]:
    """Feed requests a few at a time, so that they enter and leave a running batch."""
    rng = random.Random(seed)
    pending = list(requests)
    done: dict[str, Completion] = {}
    while pending or engine.has_work:
        for _ in range(rng.randint(0, 3)):
            if pending:
                engine.add(pending.pop(0))
        for completion in engine.step():
            done[completion.request_id] = completion
    return done


@pytest.mark.parametrize("max_batch", [1, 4, 9])
def test_mixed_batches_write_what_generate_writes(max_batch: int) -> None:
    """240 prompts in three batch sizes, with a drafter that is right, wrong, long and short by turns."""
    target = tiny.target()
    requests = make_requests(80, seed=max_batch)
    expected = {r.id: tiny.generate(target, r) for r in requests}
    oracle = drafters.NoisyOracle(expected, target.vocabulary, seed=max_batch)
    engine = Engine(target, max_batch=max_batch, prefill_chunk=40, drafters=[oracle])

    done = run(engine, requests, seed=max_batch)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == expected
    assert sum(c.acceptance.num_accepted_draft_tokens for c in done.values()) > 500
    assert engine.drafter_failures == 0
    for completion in done.values():
        check_record(completion)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_family_writes_what_generate_writes(family: str) -> None:
    """Grouped heads, biases, norms on queries, sliding windows, soft caps and sinks."""
    target = tiny.target(family)
    requests = make_requests(30, seed=3)
    expected = {r.id: tiny.generate(target, r) for r in requests}
    oracle = drafters.NoisyOracle(expected, target.vocabulary)
    engine = Engine(target, max_batch=6, prefill_chunk=64, drafters=[oracle, OwnTextDrafter()])

    done = run(engine, requests)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == expected


def test_lookup_copies_from_the_prompt_and_the_answer() -> None:
    """The default drafter proposes, is accepted, and says where it copied from."""
    target = tiny.target()
    requests = make_requests(40, seed=11)
    expected = {r.id: tiny.generate(target, r) for r in requests}

    done = run(Engine(target, max_batch=5), requests)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == expected
    sources = {source for c in done.values() for source in c.acceptance.token_sources}
    assert Source.ANSWER in sources
    assert Source.HEAD not in sources


@pytest.mark.parametrize(
    "broken",
    [
        drafters.RaisesInPropose(),
        drafters.RaisesInObserve(),
        drafters.RaisesInBeginAndEnd(),
        drafters.RaisesInFollow(1),
        drafters.RaisesInLocate(1),
        drafters.ProposesNonsense(tiny.VOCABULARY),
    ],
    ids=lambda drafter: drafter.name,
)
def test_a_broken_drafter_costs_nothing_but_time(broken: Drafter) -> None:
    """Whatever a drafter does, the answers are the target's and the next drafter still serves."""
    target = tiny.target()
    requests = make_requests(25, seed=5)
    expected = {r.id: tiny.generate(target, r) for r in requests}
    engine = Engine(target, max_batch=4, drafters=[broken, drafters.NoisyOracle(expected, target.vocabulary)])

    done = run(engine, requests)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == expected
    assert engine.drafter_failures > 0
    assert sum(c.acceptance.num_accepted_draft_tokens for c in done.values()) > 0


def test_cancelled_requests_leave_the_others_alone() -> None:
    """Slots freed by cancellation are used again without a trace of what was in them."""
    target = tiny.target()
    requests = make_requests(40, seed=8)
    expected = {r.id: tiny.generate(target, r) for r in requests}
    engine = Engine(target, max_batch=3)
    rng = random.Random(1)
    cancelled = set(rng.sample([r.id for r in requests], 15))
    for request in requests:
        engine.add(request)

    done = {}
    while engine.has_work:
        for completion in engine.step():
            done[completion.request_id] = completion
        if cancelled and rng.random() < 0.5:
            engine.cancel(cancelled.pop())
    engine.cancel("never heard of")

    assert done
    assert {i: c.acceptance.token_ids for i, c in done.items()} == {i: expected[i] for i in done}
    assert len(done) < len(requests)


def test_speculation_off_drafts_nothing() -> None:
    """A request may decline speculation, and gets the same answer one token a step."""
    target = tiny.target()
    request = Request("plain", tuple(range(60)), Sampling(max_tokens=30, speculation=False))
    expected = tiny.generate(target, request)

    done = run(Engine(target), [request])["plain"]

    assert done.acceptance.token_ids == expected
    assert done.acceptance.num_draft_tokens == 0
    assert done.acceptance.num_verify_steps == len(expected) - 1


def test_interactive_requests_go_first() -> None:
    """With one slot, an interactive request overtakes the bulk ones that wait."""
    engine = Engine(tiny.target(), max_batch=1)
    order = []
    for name in ("bulk-1", "bulk-2"):
        engine.add(Request(name, (1, 2, 3), Sampling(max_tokens=2)))
    engine.add(Request("urgent", (1, 2, 3), Sampling(max_tokens=2), interactive=True))
    while engine.has_work:
        order += [completion.request_id for completion in engine.step()]

    assert order == ["urgent", "bulk-1", "bulk-2"]


def test_drafters_that_ask_get_the_hidden_state_behind_each_token() -> None:
    """A head sees one row per emitted token: the state whose logits chose it."""
    target = tiny.target()

    class Watches(drafters.Quiet):
        wants_hidden = True

        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def observe(self, request_id, tokens, hidden):
            logits = target.model.get_output_embeddings()(hidden)
            self.seen += list(zip(logits.argmax(-1).tolist(), tokens, strict=True))

    watcher = Watches()
    requests = make_requests(6, seed=2)
    expected = {r.id: tiny.generate(target, r) for r in requests}
    oracle = drafters.NoisyOracle(expected, target.vocabulary)

    run(Engine(target, max_batch=3, drafters=[watcher, oracle]), requests)

    assert watcher.seen
    assert all(chosen == token for chosen, token in watcher.seen)
