"""Recorded steps: the same answers, and none from a recording that was not compared."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragspec.decoding import recorded_steps, static_step
from ragspec.decoding.attention import Segment
from ragspec.decoding.cache import SlotCache
from ragspec.decoding.cuda_graphs import GraphRecorder
from ragspec.decoding.engine import Engine
from ragspec.decoding.recorded_steps import RecordedSteps
from ragspec.decoding.recorder import PlainRecorder, Recorder, Replay
from ragspec.decoding.transformers_target import CHECK_TOLERANCE, TransformersTarget, make_target
from tests import tiny
from tests.unit.decoding.schedules import Schedule
from tests.unit.decoding.tape import TapeRecorder
from tests.unit.decoding.test_scheduling import make_requests, run
from tests.unit.decoding.worlds import world

OFF = "CUDA graphs are off from now on, and decode steps run kernel by kernel: "


def recording(target: TransformersTarget, recorder: Recorder) -> TransformersTarget:
    """A target that records its steps."""
    return replace(target, recorded=RecordedSteps(recorder, CHECK_TOLERANCE[torch.float32]))


@pytest.fixture
def eager_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are short: few buckets, mostly padding, which are recorded when they first come."""
    monkeypatch.setattr(recorded_steps, "RECORD_AT", 1)
    monkeypatch.setattr(static_step, "WIDTHS", (2, 12))
    monkeypatch.setattr(static_step, "MOST_PADDING", static_step.MOST_TOKENS)


@pytest.mark.usefixtures("eager_to_record")
@pytest.mark.parametrize(("name", "count"), [("smallest", 150), *((family, 12) for family in sorted(tiny.FAMILIES))])
def test_every_answer_of_a_random_schedule_is_the_targets_own(
    name: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are replayed from a tape, which keeps of Python's numbers what a CUDA graph keeps: those of its making."""
    target = recording(world(name).target, TapeRecorder())
    for seed in range(count):
        Schedule(replace(world(name), target=target), seed).run()

    assert target.recorded is not None
    assert target.recorded.replayed > 5 * count
    assert recorded_steps.__name__ not in {record.name for record in caplog.records}


class Raises:
    """Nothing can be recorded."""

    def record(self, run: Callable[[], None]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")


class Forgets:
    """Its replays do nothing: the buffers keep what they hold."""

    def record(self, run: Callable[[], None]) -> Replay:
        run()
        return lambda: None


class Breaks:
    """Its replays raise."""

    def record(self, run: Callable[[], None]) -> Replay:
        def broken() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        return broken


class Remembers:
    """A replay has the numbers of its recording in place of the step's, as if they had been captured by value."""

    def record(self, run: Callable[[], None]) -> Replay:
        step = run.__closure__[-1].cell_contents  # type: ignore[index]
        held = step._inputs.clone()

        def frozen() -> None:
            step._inputs.copy_(held)
            run()

        return frozen


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (Raises(), "failed: operation not permitted"),
        (Forgets(), "diverges from the computed step"),
        (Breaks(), "failed: an illegal memory access"),
        (Remembers(), "diverges from the computed step"),
        pytest.param(
            GraphRecorder(torch.device("cuda")),
            "failed: ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_recording_that_is_not_right_never_answers(
    recorder: Recorder, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and the target computes kernel by kernel for good, in caches to come too."""
    target = recording(tiny.target(), recorder)
    requests = make_requests(8, seed=4)

    for _ in range(2):
        done = run(_engine(target), requests)
        assert {i: c.acceptance.token_ids for i, c in done.items()} == {
            r.id: tiny.generate(target, r) for r in requests
        }
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(OFF)
    assert reason in warnings[0]
    assert target.recorded is not None
    assert target.recorded.replayed == 0


def _engine(target: TransformersTarget) -> Engine:
    return Engine(target, max_batch=4)


@torch.inference_mode()
def test_what_did_not_come_twice_is_not_recorded_and_the_least_used_recording_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Widths 1, 2 and 4, and room for two recordings."""
    monkeypatch.setattr(recorded_steps, "MOST_RECORDINGS", 2)
    target = recording(tiny.target(), PlainRecorder())
    cache = target.make_cache(2, 64)

    def replays(*widths: int) -> list[bool]:
        return [_replays(target, cache, width) for width in widths]

    assert replays(1, 1, 1, 2, 2, 2, 1) == [False, False, True, False, False, True, True]
    assert replays(4, 4, 1, 4, 2) == [False, False, True, True, False]


def _replays(target: TransformersTarget, cache: SlotCache, width: int) -> bool:
    assert target.recorded is not None
    before = target.recorded.replayed
    target.forward(cache, [Segment(1, 3, width)], [0] * width, [0])
    return target.recorded.replayed > before


@torch.inference_mode()
def test_a_cache_and_its_recordings_go_together() -> None:
    """At once, not when rubbish is next collected: the engine's cache wants the memory of the profile's."""
    target = recording(tiny.target(), TapeRecorder())
    cache = target.make_cache(2, 64)
    assert [_replays(target, cache, 1) for _ in range(3)] == [False, False, True]
    assert target.recorded is not None
    gone = (
        weakref.ref(cache),
        *map(weakref.ref, cache._keys.values()),
        weakref.ref(target.recorded._shelves[cache].outputs.logits),
    )

    gc.disable()
    try:
        del cache
        assert [one() for one in gone] == [None] * len(gone)
    finally:
        gc.enable()


@torch.inference_mode()
def test_recordings_make_room_for_a_step_that_finds_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt chunk that memory does not hold is computed again without them; without them it is an error as ever."""
    target = recording(tiny.target(), PlainRecorder())
    cache = target.make_cache(2, 64)
    chunk = [Segment(0, 0, 30)], list(range(30)), [29]
    expected = target.forward(cache, *chunk)
    attempts = []
    compute = type(target)._compute

    def short(self: TransformersTarget, plan: Any) -> Any:
        attempts.append(None)
        if len(attempts) != 2:
            raise torch.OutOfMemoryError("no room")
        return compute(self, plan)

    monkeypatch.setattr(type(target), "_compute", short)

    assert torch.equal(target.forward(cache, *chunk).logits, expected.logits)
    assert [record.getMessage() for record in caplog.records] == [OFF + "no room"]
    with pytest.raises(torch.OutOfMemoryError):
        target.forward(cache, *chunk)


@torch.inference_mode()
def test_numbers_that_are_not_finite_speak_against_no_recording(caplog: pytest.LogCaptureFixture) -> None:
    """A slot went wrong; the next step that did not shows what the recording is worth."""
    target = recording(tiny.target(), PlainRecorder())
    cache = target.make_cache(2, 64)
    target.forward(cache, [Segment(1, 0, 20)], [0] * 20, [19])
    cache._keys[0][1, :, 1] = torch.nan

    assert [_replays(target, cache, 1) for _ in range(3)] == [False, False, False]
    cache.clear(1)
    assert [_replays(target, cache, 1) for _ in range(2)] == [False, True]
    assert not caplog.records


@torch.inference_mode()
def test_what_a_replay_gives_is_the_callers_own() -> None:
    """The next replay writes into its own buffers, not into what was given."""
    target = recording(tiny.target(), TapeRecorder())
    cache = target.make_cache(2, 64)
    given = [target.forward(cache, [Segment(1, 3, 2)], [token, 5], [0, 1], hidden=True) for token in (1, 1, 1, 2)]

    assert torch.equal(given[1].choices, given[2].choices)
    torch.testing.assert_close(given[1].logits, given[2].logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given[1].hidden, given[2].hidden, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(given[2].logits, given[3].logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graphs_answer_as_the_target_alone() -> None:
    target = tiny.target()
    on_card = make_target(
        copy.deepcopy(target.model).cuda(), target.tokenizer, "on the card", GraphRecorder(torch.device("cuda"))
    )
    requests = make_requests(12, seed=4)

    done = run(_engine(on_card), requests)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == {r.id: tiny.generate(target, r) for r in requests}
    assert on_card.recorded is not None
    assert on_card.recorded.replayed > 10
