"""What a step takes: between what was measured, beyond it, and as the steps correct it."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragspec.decoding import memory, recorded_steps
from ragspec.decoding.profiling import profile_steps
from ragspec.decoding.recorded_steps import RecordedSteps
from ragspec.decoding.recorder import PlainRecorder
from ragspec.decoding.static_step import Bucket, bucket_of
from ragspec.decoding.step_cost import FREE, StepCost, StepLoad, StepProfile
from ragspec.decoding.transformers_target import CHECK_TOLERANCE
from tests import tiny

PROFILE = StepProfile(
    sequences=(1, 4),
    widths=(1, 2, 4),
    decode=((10.0, 11.0, 13.0), (20.0, 24.0)),
    context=100,
    context_token=0.01,
    chunk_rows=(16, 64),
    chunk=(12.0, 60.0),
)


def seconds(load: StepLoad, most: int) -> list[float]:
    return StepCost(PROFILE).seconds(load, most).tolist()


def test_measured_steps_take_what_was_measured() -> None:
    assert seconds(StepLoad(1, 100), 3) == [10.0, 11.0, 12.0, 13.0]
    assert seconds(StepLoad(4, 100), 4)[::4] == [20.0, 24.0]


def test_between_and_beyond_what_was_measured_lie_straight_lines() -> None:
    assert seconds(StepLoad(1, 100), 5)[5] == pytest.approx(15.0)
    assert seconds(StepLoad(4, 100), 12)[12] == pytest.approx(32.0), "a width that was not timed for this batch"
    assert 10.0 < seconds(StepLoad(2, 100), 0)[0] < 20.0
    assert seconds(StepLoad(9, 100), 0)[0] == 20.0, "a batch beyond the profile is taken for its largest"


def test_a_longer_context_costs_by_the_token() -> None:
    assert seconds(StepLoad(4, 200), 0) == [pytest.approx(24.0)]
    assert seconds(StepLoad(4, 0), 0) == [pytest.approx(16.0)]


def test_beside_a_prompt_chunk_a_row_costs_what_it_costs_there() -> None:
    alone, beside = seconds(StepLoad(1, 100), 2), seconds(StepLoad(1, 100, prompt_rows=63), 2)

    assert beside[0] > alone[0] + 40
    assert beside[2] - beside[1] == pytest.approx(alone[2] - alone[1] + 1.0), "the chunk's line rises by 1 a row"


def test_more_rows_never_take_less_whatever_the_noise() -> None:
    noisy = StepCost(
        StepProfile((1, 4), (1, 2, 4), ((10.0, 8.0, 12.0), (9.0, 7.0, 30.0)), 0, 0.0, (16, 64), (5.0, 4.0))
    )
    for sequences, rows in itertools.product((1, 2, 3, 4), (0, 50)):
        curve = noisy.seconds(StepLoad(sequences, 0, rows), 12).tolist()
        assert curve == sorted(curve)
    assert noisy.seconds(StepLoad(4), 0)[0] >= noisy.seconds(StepLoad(1), 0)[0]


def test_without_a_profile_rows_are_free() -> None:
    """And stay so, whatever steps take."""
    cost = StepCost(FREE)
    assert cost.seconds(StepLoad(7, 300, prompt_rows=100), 5).tolist() == [1.0] * 6


@pytest.mark.parametrize("max_batch", [1, 6])
def test_a_target_is_profiled_up_to_the_largest_batch(max_batch: int) -> None:
    """By a clock that counts its own readings, so that no time is measured."""
    ticks = itertools.count()
    profile = profile_steps(tiny.target(), max_batch=max_batch, window=128, clock=lambda: float(next(ticks)))

    assert profile.sequences[0] == 1
    assert profile.sequences[-1] == max_batch
    assert profile.context == 64
    assert all(value == 1.0 for row in (*profile.decode, profile.chunk) for value in row)
    assert profile.context_token == 0.0
    StepCost(profile).seconds(StepLoad(max_batch, 64), 10)


class Watched:
    """A target that notes what it is asked for."""

    def __init__(self, target: Any, refusal: Exception | None = None) -> None:
        self._target = target
        self._refusal = refusal
        self.slots = self.capacity = self.longest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def make_cache(self, slots: int, capacity: int) -> Any:
        self.slots, self.capacity = slots, capacity
        if self._refusal is not None:
            raise self._refusal
        return self._target.make_cache(slots, capacity)

    def forward(self, cache: Any, segments: Any, *given: Any) -> Any:
        self.longest = max(self.longest, *(segment.start + segment.length for segment in segments))
        return self._target.forward(cache, segments, *given)


@pytest.mark.parametrize("window", [2, 3, 7, 20, 63, 64, 1000])
def test_no_timed_pass_exceeds_the_window_nor_the_targets_own(window: int) -> None:
    target = Watched(tiny.smallest())
    profile = profile_steps(target, max_batch=2, window=window)

    assert target.longest <= target.capacity <= min(window, target.context_window)
    StepCost(profile).seconds(StepLoad(2, 1, prompt_rows=100), 10)


@pytest.mark.parametrize(("window", "context_token"), [(512, 1.0), (200, 0.0)])
def test_padded_passes_are_timed_as_the_engine_runs_them(
    window: int, context_token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the same context, by a clock on which each place that is read takes a second.

    Of 200 tokens all contexts are padded to the same.
    """
    now = 0.0

    def seen(segments: Any, slots: int, capacity: int, features: tuple[int, ...]) -> Bucket | None:
        nonlocal now
        bucket = bucket_of(segments, slots, capacity, features)
        assert bucket == bucket_of(segments, slots, window, features)
        now += bucket.rows * bucket.context if bucket else 0.0
        return bucket

    monkeypatch.setattr(recorded_steps, "bucket_of", seen)
    target = replace(tiny.target(), recorded=RecordedSteps(PlainRecorder(), CHECK_TOLERANCE[torch.float32]))

    profile = profile_steps(target, max_batch=4, window=window, clock=lambda: now)

    assert profile.sequences == (1, 4)
    assert profile.context_token == context_token
    assert target.recorded.replayed > 0
    assert not target.recorded.given_up


def test_as_many_sequences_are_profiled_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine's own slots, which are longer than those that are timed."""
    target = Watched(tiny.target())
    monkeypatch.setattr(
        "ragspec.decoding.profiling.free_memory", lambda _: int(3.5 * target.slot_bytes(512) / memory.USABLE)
    )

    assert profile_steps(target, max_batch=64, window=512).sequences == (1, 3)
    assert target.slots == 3


def test_memory_is_left_for_those_who_keep_something_in_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Watched(tiny.target())
    monkeypatch.setattr(
        "ragspec.decoding.profiling.free_memory", lambda _: int(6.5 * target.slot_bytes(512) / memory.USABLE)
    )

    assert profile_steps(target, max_batch=64, window=512, beside=[target]).sequences == (1, 3)


def test_a_target_that_memory_does_not_let_be_profiled_is_used_without(caplog: pytest.LogCaptureFixture) -> None:
    target = Watched(tiny.target(), RuntimeError("no room"))
    with caplog.at_level(logging.WARNING):
        profile = profile_steps(target, max_batch=4, window=128)

    assert profile is FREE
    assert [record.message for record in caplog.records] == [
        "steps are not profiled, so every draft is verified whole: no room"
    ]


def test_a_pass_that_was_disturbed_is_not_believed() -> None:
    """The first pass of one token was timed slower than that of two: rows up to there would look free."""
    disturbed = StepProfile((1, 4), (1, 2, 4), ((7.2, 6.2, 8.0), (9.0, 9.5, 11.0)), 0, 0.0, (1, 64), (1.0, 2.0))
    costs = StepCost(disturbed)

    assert list(costs.seconds(StepLoad(1), 3)) == pytest.approx([6.2, 6.2, 7.1, 8.0])
