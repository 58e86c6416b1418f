"""Random schedules: requests of every kind enter and leave an engine of any size, and each gets the target's own answer.

`python -m tests.unit.decoding.schedules SEED [FAMILY]` replays one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest

from ragspec.decoding.draft import Draft, Drafter
from ragspec.decoding.engine import Engine
from ragspec.decoding.lookup import OwnTextDrafter
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.decoding.target import Target
from ragspec.errors import InputError
from tests import tiny
from tests.unit.decoding import drafters
from tests.unit.decoding.plain import Answer, PlainDecoder
from tests.unit.decoding.records import check_record

#: Rounds after which a schedule that has not come to its end never will.
MOST_ROUNDS = 2000


@dataclass(frozen=True)
class World:
    """A target and requests whose answers are known.

    Attributes:
        target: what decodes.
        plain: the same alone.
        pool: prompts and how each is to be continued.
        windows: context windows that schedules have.
    """

    target: Target
    plain: PlainDecoder
    pool: Sequence[tuple[tuple[int, ...], Sampling, Answer]]
    windows: tuple[int, ...]


@lru_cache
def world(family: str = "smallest") -> World:
    """The smallest model with 700 requests, or one of a family's shape with 60 that outgrow its sliding window."""
    rng = random.Random(1)
    if family == "smallest":
        return _make_world(rng, tiny.smallest(), prompts=40, requests=700, longest=24, windows=(64, 64, 28, 18))
    return _make_world(rng, tiny.target(family), prompts=12, requests=60, longest=60, windows=(128, 64))


def _make_world(
    rng: random.Random, target: Target, *, prompts: int, requests: int, longest: int, windows: tuple[int, ...]
) -> World:
    plain = PlainDecoder(target)
    letters = target.vocabulary - 2
    prefixes = [[rng.randrange(letters) for _ in range(longest)] for _ in range(3)]
    texts = [_draw_prompt(rng, prefixes, letters) for _ in range(prompts)]
    pool = []
    while len(pool) < requests:
        prompt = rng.choice(texts)
        free = plain.answer(prompt, Sampling(max_tokens=16)).text
        sampling = _draw_sampling(rng, free, target)
        answer = plain.answer(prompt, sampling)
        # Where a choice is within rounding, another processor may rightly write something else.
        if answer.certain:
            pool.append((prompt, sampling, answer))
    return World(target, plain, pool, windows)


def _draw_prompt(rng: random.Random, prefixes: list[list[int]], letters: int) -> tuple[int, ...]:
    """Half begin like another prompt; the rest of each is random, or repeats a phrase."""
    longest = len(prefixes[0])
    begin = rng.choice(prefixes)[: rng.randrange(longest)] if rng.random() < 0.5 else []
    phrase = [rng.randrange(letters) for _ in range(rng.choice([1, 2, 3, 5, longest]))]
    rest = (phrase * longest)[: rng.randint(1, longest - len(begin))]
    return tuple(begin + rest)


def _draw_sampling(rng: random.Random, free: str, target: Target) -> Sampling:
    """Any mixture of options; stop strings are such as the answer may hold."""
    sampling = Sampling(max_tokens=rng.randint(1, 10))
    changes: dict[str, Any] = {}
    if rng.random() < 0.4:
        changes |= {"temperature": rng.choice([0.6, 1.3]), "seed": rng.randrange(10**6)}
        changes |= {"top_k": rng.choice([0, 0, 5]), "top_p": rng.choice([1.0, 1.0, 0.7])}
    if rng.random() < 0.35:
        changes |= {"repetition_penalty": rng.choice([1.0, 1.5, 0.7])}
        changes |= {"presence_penalty": rng.choice([0.0, 1.9, -1.1]), "frequency_penalty": rng.choice([0.0, 0.9, -0.7])}
    if rng.random() < 0.25:
        (end,) = target.eos_ids
        tokens = rng.sample(range(target.vocabulary - 2), 2) + [end] * rng.randint(0, 1)
        changes["logit_bias"] = tuple((token, rng.choice([-100.0, 2.5, 4.5])) for token in tokens)
    if rng.random() < 0.3:
        changes["min_tokens"] = rng.randint(1, sampling.max_tokens)
    if free and rng.random() < 0.4:
        start = rng.randrange(len(free))
        changes["stop"] = ("\N{SNOWMAN}", free[start : start + rng.randint(1, 3)])
    return replace(sampling, **changes)


class NowAndThen(drafters.NoisyOracle):
    """Raises at random, in any of its methods."""

    name = "now and then"

    def __init__(self, answers: Mapping[str, Sequence[int]], vocabulary: int, seed: int) -> None:
        super().__init__(answers, vocabulary, seed=seed)
        self._dice = random.Random(seed)

    def begin(self, request: Request) -> None:
        self._maybe_raise()
        super().begin(request)

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Any) -> None:
        super().observe(request_id, tokens, hidden)
        self._maybe_raise()

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        self._maybe_raise()
        return super().propose(limits)

    def _maybe_raise(self) -> None:
        if self._dice.random() < 0.05:
            msg = "bad luck"
            raise RuntimeError(msg)


class Register(drafters.Quiet):
    """Keeps who is in and what it was told of them."""

    name = "register"

    def __init__(self, *, wants_hidden: bool) -> None:
        self.wants_hidden = wants_hidden
        self.told: dict[str, list[int]] = {}
        self.consistent = True

    def begin(self, request: Request) -> None:
        self.told[request.id] = []

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Any) -> None:
        self.told[request_id] += tokens
        self.consistent &= (None if hidden is None else len(hidden)) == (len(tokens) if self.wants_hidden else None)

    def end(self, request_id: str) -> None:
        self.told.pop(request_id, None)


@dataclass
class Schedule:
    """One run, all of it drawn from its seed."""

    world: World
    seed: int
    requests: dict[str, Request] = field(default_factory=dict)
    expected: dict[str, Answer] = field(default_factory=dict)
    done: dict[str, Completion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.window = self.rng.choice(self.world.windows)
        for i in range(self.rng.randint(1, 5)):
            prompt, sampling, answer = self.rng.choice(self.world.pool)
            sampling = replace(sampling, speculation=self.rng.random() < 0.9)
            self.requests[f"r{i}"] = Request(
                f"r{i}", prompt, sampling, self._passages(prompt), interactive=self.rng.random() < 0.3
            )
            self.expected[f"r{i}"] = self.world.plain.cut(answer, self.window - len(prompt))
        self.register = Register(wants_hidden=self.rng.random() < 0.3)
        self.engine = self._engine()

    def _passages(self, prompt: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        start = self.rng.randint(0, len(prompt))
        return ((start, self.rng.randint(start, len(prompt))),)

    def _engine(self) -> Engine:
        known = {i: answer.tokens for i, answer in self.expected.items()}
        vocabulary, seed = self.world.target.vocabulary, self.seed
        kinds: list[Drafter] = [
            *(drafters.NoisyOracle(known, vocabulary, noise=noise, seed=seed) for noise in (0, 0.1, 0.3, 1)),
            OwnTextDrafter(),
            NowAndThen(known, vocabulary, seed),
            drafters.ProposesNonsense(vocabulary, seed),
        ]
        return Engine(
            self.world.target,
            max_batch=self.rng.choice([1, 2, 3, 5]),
            context_window=self.window,
            prefill_chunk=self.rng.choice([5, 16, 40, 512]),
            max_draft=self.rng.choice([0, 1, 3, 5, 8, 12]),
            drafters=[*self.rng.sample(kinds, self.rng.choice([1, 2, 2, 3])), self.register],
        )

    def run(self) -> None:
        """Let requests enter, leave and be cancelled until none is left, then compare."""
        pending = list(self.requests.values())
        entered: set[str] = set()
        for _ in range(MOST_ROUNDS):
            for _ in range(min(len(pending), self.rng.choice([0, 1, 3, 6]))):
                entered.update(self._enter(pending.pop(0)))
            if entered and self.rng.random() < 0.05:
                cancelled = self.rng.choice(sorted(entered))
                self.engine.cancel(cancelled)
                if cancelled not in self.done:
                    entered.discard(cancelled)
                    # One that was cancelled may come again under its name.
                    pending += [self.requests[cancelled]] if self.rng.random() < 0.5 else []
            for completion in self.engine.step():
                assert completion.request_id not in self.done
                self.done[completion.request_id] = completion
            if not pending and not self.engine.has_work:
                break
        assert set(self.done) == entered
        assert (self.engine.running, self.engine.waiting, self.register.told) == (0, 0, {})
        assert self.register.consistent
        for request_id, completion in self.done.items():
            self._compare(completion, self.expected[request_id])

    def _enter(self, request: Request) -> list[str]:
        if len(request.prompt) < self.window:
            self.engine.add(request)
            return [request.id]
        with pytest.raises(InputError, match="the window holds"):
            self.engine.add(request)
        return []

    def _compare(self, completion: Completion, expected: Answer) -> None:
        record, request = completion.acceptance, self.requests[completion.request_id]
        written = (record.token_ids, completion.finish_reason, completion.text)
        alone = (expected.tokens, expected.finish_reason, expected.text)
        assert written == alone, f"{request} gets {written}, alone {alone}"
        assert record.token_logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert request.sampling.speculation or not record.num_draft_tokens
        check_record(completion)


def replay(seed: int, family: str = "smallest") -> Schedule:
    """Run the schedule of a seed; a failure says how to run it again."""
    try:
        schedule = Schedule(world(family), seed)
        schedule.run()
    except Exception as error:
        again = f"python -m tests.unit.decoding.schedules {seed} {family}"
        raise AssertionError(f"schedule {seed} of {family} fails; replay it by `{again}`: {error}") from error
    return schedule


if __name__ == "__main__":
    replay(int(sys.argv[1]), *sys.argv[2:3])
