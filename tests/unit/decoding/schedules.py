"""Random schedules: requests of every kind enter and leave an engine of any size, and each gets the target's own answer.

`python -m tests.unit.decoding.schedules SEED [WORLD]` replays one.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ragspec.decoding import engine as engine_module
from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft, Drafter, Stakes
from ragspec.decoding.engine import Engine
from ragspec.decoding.feature_drafter import make_head_drafter
from ragspec.decoding.lookup import JobDrafter, OwnTextDrafter
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.decoding.step_cost import FREE, StepLoad, StepProfile
from ragspec.decoding.stopping import holds_stop
from ragspec.decoding.target import Target
from ragspec.errors import InputError
from tests.unit.decoding import drafters, heads
from tests.unit.decoding.plain import Answer, Tokens, cut
from tests.unit.decoding.records import check_record
from tests.unit.decoding.worlds import World, world

#: Rounds after which a schedule that has not come to its end never will.
MOST_ROUNDS = 2000
#: Slots that memory holds.
SLOTS = 100
#: How likely a call fails that may, and one that is seldom made.
MISHAP, RARE_MISHAP = 0.03, 0.1


class Mishaps:
    """Makes calls fail now and then, as memory, a tokenizer or Ctrl-C do.

    Attributes:
        seen: how often did which.
    """

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self._random = random.Random(seed)
        self._seen = seen
        self._raised: BaseException | None = None

    def befall(self, where: str, call: Callable[..., Any], likelihood: float = MISHAP) -> Callable[..., Any]:
        """The call, which may fail before or after it has done its work."""

        def risky(*given: Any, **options: Any) -> Any:
            self._maybe_raise(f"fails before {where}", likelihood)
            result = call(*given, **options)
            self._maybe_raise(f"fails after {where}", likelihood)
            return result

        return risky

    @contextlib.contextmanager
    def survived(self) -> Iterator[None]:
        """Catch what was raised on purpose, and nothing else."""
        try:
            yield
        except BaseException as error:
            if error is not self._raised:
                raise

    def _maybe_raise(self, what: str, likelihood: float) -> None:
        if self._random.random() < likelihood:
            self._seen[what] += 1
            kind = self._random.choice([RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt])
            self._seen[kind.__name__] += 1
            self._raised = kind(what)
            raise self._raised


class RiskyTarget:
    """A target whose forward pass may fail."""

    def __init__(self, target: Target, mishaps: Mishaps) -> None:
        self._target = target
        self.forward = mishaps.befall("forward", target.forward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@dataclass
class Schedule:
    """One run, all of it drawn from its seed.

    Attributes:
        seen: how often happened what a test of many schedules wants to have happened.
    """

    world: World
    seed: int
    requests: dict[str, Request] = field(default_factory=dict)
    expected: dict[str, Answer] = field(default_factory=dict)
    done: dict[str, Completion] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.window = self.rng.choice(self.world.windows)
        families = self.rng.sample(self.world.families, self.rng.choice([1, 2, 4]))
        prompts = [prompt for family in families for prompt in family]
        # Few prompts and some asked twice: then prefixes are shared, and answers of a job are alike.
        prompts = self.rng.sample(prompts, self.rng.choice([2, 3, len(prompts), len(prompts)]))
        asked = []
        for i in range(self.rng.randint(1, 7)):
            if not asked or self.rng.random() < 0.7:
                prompt = self.rng.choice(prompts)
                asked.append((prompt, *self.rng.choice(self.world.answers[prompt])))
            self._draw_request(f"r{i}", *self.rng.choice(asked))
        self.register = drafters.Register(wants_hidden=self.rng.random() < 0.3)
        self.mishaps = Mishaps(self.seed, self.seen)
        self.engine = self._engine()
        #: Answers that ended or were given up, by group: what drafts of the group may be copied from.
        self._given: dict[str | None, list[Tokens]] = {"a": [], "b": []}
        self._interrupted: set[str] = set()
        self._watch()

    def _draw_request(self, name: str, prompt: Tokens, sampling: Sampling, answer: Answer) -> None:
        sampling = replace(sampling, speculation=self.rng.random() < 0.9)
        start = self.rng.randint(0, len(prompt))
        self.requests[name] = Request(
            name,
            prompt,
            sampling,
            passage_spans=((start, self.rng.randint(start, len(prompt))),),
            interactive=self.rng.random() < len(self.requests) / 8,  # the later, the likelier: bulk ones run by then
            group=self.rng.choice(["a", "a", "b", "b", None]),
        )
        self.expected[name] = cut(answer, self.window - len(prompt), self.world.target.tokenizer)

    def _engine(self) -> Engine:
        # As if memory held so many slots, so that a share of it is a number of keeping slots: few, and prefixes contend.
        free = SLOTS * self.world.target.slot_bytes(self.window)
        self.share = self.rng.choice([0, 0.5, 1.5, 1.5, 1.5, 2.5]) / SLOTS
        with mock.patch("ragspec.decoding.memory.free_memory", return_value=free):
            return Engine(
                self.world.target,
                max_batch=self.rng.choice([1, 1, 1, 2, 4]),
                context_window=self.window,
                prefill_chunk=self.rng.choice([5, 16, 40, 512]),
                max_draft=self.rng.choice([0, 1, 3, 5, 8, 12]),
                drafters=[*self._drafters(), self.register],
                prefix_cache=self.share,
                step_profile=self.rng.choice([FREE, self._profile()]),
            )

    def _drafters(self) -> list[Drafter]:
        known = {i: answer.tokens for i, answer in self.expected.items()}
        vocabulary, seed = self.world.target.vocabulary, self.seed
        kinds: list[Drafter] = [
            *(drafters.NoisyOracle(known, vocabulary, noise=noise, seed=seed) for noise in (0, 0.1, 0.3, 1)),
            drafters.NowAndThen(known, vocabulary, seed),
            *(
                make_head_drafter(chain, longest=self.rng.choice([1, 2, 6]))
                for chain in (
                    heads.random_chain(self.world.target, self.rng.choice(heads.ARCHITECTURES)),
                    heads.KnowingChain(known.values(), seed),
                    heads.RaisingChain(
                        heads.random_chain(self.world.target, self.rng.choice(["recurrent", "attention"])), seed
                    ),
                )
            ),
            drafters.ProposesNonsense(vocabulary, seed),
        ]
        lookups: list[Drafter] = [OwnTextDrafter(), JobDrafter()]
        return [
            *lookups[: self.rng.choice([0, 1, 2, 2, 2])],
            *self.rng.sample(kinds, self.rng.choice([0, 1, 2, 2])),
            drafters.GoesOn(),
        ]

    def _profile(self) -> StepProfile:
        """Draft rows so dear that many are not worth verifying."""
        row = self.rng.choice([0.03, 0.1, 0.4])
        return StepProfile((1, 5), (1, 2), ((1.0, 1.0 + row), (2.0, 2.0 + 5 * row)), 20, 0.001, (4, 16), (1.0, 2.0))

    def _watch(self) -> None:
        """Count what the engine does unseen, and let its clock be drawn too: what is cut and when drafters rest hangs on it."""
        mishaps = self.mishaps
        self.engine.target = RiskyTarget(self.world.target, mishaps)
        panel, width, cache = self.engine._panel, self.engine._width, self.engine._cache
        propose, draft, copy_prefix = (
            panel.propose,
            width.draft,
            mishaps.befall("copying", cache.copy_prefix, RARE_MISHAP),
        )
        propose_costly, extended = panel.propose_costly, panel.extended
        proposed: dict[str, list[Draft]] = {}
        time, pace = random.Random(self.seed), self.rng.choice([1e-6, 1e-6, 1e-6, 0.2, 2.0])
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += pace * time.random()
            return now

        def watched_propose(limits: Mapping[str, int]) -> dict[str, list[Draft]]:
            proposed.update(propose(limits))
            self.seen["asked"] += 1
            return dict(proposed)

        def watched_draft(limits: Mapping[str, int], load: StepLoad) -> dict[str, Draft]:
            proposed.clear()
            asked = self.seen["asked"]
            drafts = draft(limits, load)
            self.seen["pauses"] += bool(limits) and self.seen["asked"] == asked
            for request_id, offers in proposed.items():
                verified = drafts.get(request_id, Draft()).tokens
                assert any(offer.tokens[: len(verified)] == verified for offer in offers)
                self.seen["cuts"] += len(verified) < min(len(offer.tokens) for offer in offers)
            return drafts

        def watched_copy(source: int, destination: int, length: int) -> None:
            self.seen["kept"] += destination >= self.engine._scheduler._slots.working
            copy_prefix(source, destination, length)

        def watched_costly(limits: Mapping[str, int], stakes: Stakes) -> dict[str, list[Draft]]:
            offers = propose_costly(limits, stakes)
            for request_id, drafts in offers.items():
                proposed[request_id] = [*proposed.get(request_id, []), *drafts]
            return offers

        def watched_extended(request_id: str, ahead: Draft, limit: int) -> Draft:
            whole = extended(request_id, ahead, limit)
            proposed[request_id] = [*proposed[request_id], whole]
            self.seen["extended"] += len(whole.tokens) > len(ahead.tokens)
            return whole

        panel.propose, width.draft, width._clock = watched_propose, watched_draft, clock
        panel.propose_costly, panel.extended = watched_costly, watched_extended
        cache.copy_prefix = watched_copy

    def run(self) -> None:
        """Let requests enter, leave and be cancelled until none is left, then compare."""
        pending = list(self.requests.values())
        entered: set[str] = set()
        for _ in range(MOST_ROUNDS):
            for _ in range(min(len(pending), self.rng.choice([0, 0, 0, 1, 2, 4]))):
                entered.update(self._enter(pending.pop(0)))
            if entered and self.rng.random() < 0.05:
                cancelled = self.rng.choice(sorted(entered))
                self.engine.cancel(cancelled)
                if cancelled not in self.done:
                    entered.discard(cancelled)
                    self._give(cancelled)
                    # One that was cancelled may come again under its name.
                    pending += [self.requests[cancelled]] if self.rng.random() < 0.5 else []
            for completion in self._step():
                assert completion.request_id not in self.done
                self.done[completion.request_id] = completion
                self._check_job_drafts(completion)
            self._interrupted |= {s.request.id for _, s in self.engine._scheduler._line if len(s.tokens) > 1}
            if not pending and not self.engine.has_work:
                break
        assert set(self.done) == entered
        assert (self.engine.running, self.engine.waiting, self.register.told) == (0, 0, {})
        assert self.register.consistent
        self._check_slots()
        for request_id, completion in self.done.items():
            self._compare(completion, self.expected[request_id])
        self._count()

    def _step(self) -> list[Completion]:
        with (
            self.mishaps.survived(),
            mock.patch.object(engine_module, "holds_stop", self.mishaps.befall("looking for stops", holds_stop)),
        ):
            return self.engine.step()
        return []

    def _check_slots(self) -> None:
        """All are given back, and nobody is known who is not there."""
        scheduler = self.engine._scheduler
        pool = scheduler._slots
        assert sorted([*pool._empty, *pool._idle]) == list(range(pool.working))
        assert sorted(pool._kept) == list(range(pool.working, self.engine._cache.slots))
        assert not any(pool._index.length(slot) for slot in pool._empty)
        assert (scheduler._known, scheduler._line) == ({}, [])

    def _enter(self, request: Request) -> list[str]:
        if len(request.prompt) < self.window:
            self.engine.add(request)
            return [request.id]
        with pytest.raises(InputError, match="the window holds"):
            self.engine.add(request)
        return []

    def _give(self, request_id: str) -> None:
        self._given.setdefault(self.requests[request_id].group, []).append(self.expected[request_id].tokens)

    def _check_job_drafts(self, completion: Completion) -> None:
        """What was copied from the job stands in an earlier answer of that job."""
        record, group = completion.acceptance, self.requests[completion.request_id].group
        marked = zip(record.token_ids, record.token_sources, strict=True)
        for source, run in groupby(marked, key=lambda pair: pair[1]):
            copied = tuple(token for token, _ in run)
            if source is Source.JOB:
                self.seen["job tokens"] += len(copied)
                assert group is not None
                assert any(
                    answer[start : start + len(copied)] == copied
                    for answer in self._given[group]
                    for start in range(len(answer))
                ), f"{completion.request_id} of job {group} copied {copied}, which stands in none of {self._given}"
        self._give(completion.request_id)

    def _compare(self, completion: Completion, expected: Answer) -> None:
        record, request = completion.acceptance, self.requests[completion.request_id]
        written = (record.token_ids, completion.finish_reason, completion.text)
        alone = (expected.tokens, expected.finish_reason, expected.text)
        assert completion.finish_reason != "error"
        assert written == alone, f"{request} gets {written}, alone {alone}"
        assert record.token_logprobs == pytest.approx(expected.logprobs, rel=0, abs=self.world.tolerance)
        assert request.sampling.speculation or not record.num_draft_tokens
        assert completion.cached_prompt_tokens < len(request.prompt)
        check_record(completion)

    def _count(self) -> None:
        assert self.share or not self.engine.prefix_hit_tokens
        self.seen["prefix hits"] += self.engine.prefix_hit_tokens
        self.seen["evictions"] += max(0, self.seen["kept"] - len(self.engine._scheduler._slots._kept))
        self.seen["resumptions"] += len(self._interrupted & set(self.done))
        for completion in self.done.values():
            self.seen[completion.finish_reason] += 1
            record = completion.acceptance
            self.seen["accepted"] += record.num_accepted_draft_tokens
            self.seen["refused"] += record.num_draft_tokens - record.num_accepted_draft_tokens


def replay(seed: int, name: str = "smallest", kernels: Path | None = None) -> Counter[str]:
    """Run the schedule of a seed and return what it saw; a failure says how to run it again."""
    schedule = Schedule(world(name, kernels), seed)
    try:
        schedule.run()
    except Exception as error:
        again = f"python -m tests.unit.decoding.schedules {seed} {name}"
        raise AssertionError(f"schedule {seed} of {name} fails; replay it by `{again}`: {error}") from error
    return schedule.seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        replay(int(sys.argv[1]), *sys.argv[2:3], kernels=Path(folder))
