"""Recorded steps: the same answers, and none from a recording that was not compared."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from ragspec.decoding import recorded_steps, static_step, transformers_target
from ragspec.decoding.attention import Plan, Segment
from ragspec.decoding.cache import SlotCache
from ragspec.decoding.cuda_graphs import GraphRecorder
from ragspec.decoding.engine import Engine
from ragspec.decoding.lookup import JobDrafter, OwnTextDrafter
from ragspec.decoding.recorded_steps import RecordedSteps
from ragspec.decoding.recorder import PlainRecorder, Recorder, Replay
from ragspec.decoding.static_step import StaticStep
from ragspec.decoding.step_plan import StepPlan
from ragspec.decoding.target import StepOutput
from ragspec.decoding.transformers_target import CHECK_TOLERANCE, TransformersTarget, make_target
from tests import tiny
from tests.unit.decoding.drafters import NoisyOracle, Reads
from tests.unit.decoding.schedules import Schedule
from tests.unit.decoding.tape import Tape, TapeRecorder
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


class Raises(PlainRecorder):
    """Nothing can be recorded."""

    def record(self, run: Callable[[], None]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")


class Forgets(PlainRecorder):
    """Its replays do nothing: the buffers keep what they hold."""

    def record(self, run: Callable[[], None]) -> Replay:
        run()
        return lambda: None


class Breaks(PlainRecorder):
    """Its replays raise."""

    def record(self, run: Callable[[], None]) -> Replay:
        def broken() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        return broken


class BreaksUnseen(PlainRecorder):
    """Its replays go wrong on a device that nobody has waited for yet."""

    def settle(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def step_of(run: Callable[[], None]) -> StaticStep:
    """The step whose pass a recorder is given."""
    step: StaticStep = run.__closure__[-1].cell_contents  # type: ignore[index]
    return step


class Remembers(PlainRecorder):
    """A replay has the numbers of its recording in place of the step's, as if they had been captured by value."""

    def record(self, run: Callable[[], None]) -> Replay:
        step = step_of(run)
        held = step._inputs.clone()

        def frozen() -> None:
            step._inputs.copy_(held)
            run()

        return frozen


class Miscounts(PlainRecorder):
    """Its replays give the right distributions and choose the token behind the likeliest."""

    def record(self, run: Callable[[], None]) -> Replay:
        step = step_of(run)

        def skewed() -> None:
            run()
            step._outputs.choices.add_(1)

        return skewed


class Mislays(PlainRecorder):
    """Its replays give the right distributions, and nothing of what enters the layers."""

    def record(self, run: Callable[[], None]) -> Replay:
        step = step_of(run)

        def mislaid() -> None:
            run()
            for states in step._outputs.features.values():
                states.zero_()

        return mislaid


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (Raises(), "failed: operation not permitted"),
        (Forgets(), "diverges from the computed step"),
        (Breaks(), "failed: an illegal memory access"),
        (BreaksUnseen(), "failed: an illegal memory access"),
        (Remembers(), "diverges from the computed step"),
        (Miscounts(), "chooses other tokens than its own logits do"),
        (Mislays(), "other states between layers"),
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
    """One of whose drafters reads what enters two layers."""
    return Engine(target, max_batch=4, drafters=[OwnTextDrafter(), JobDrafter(), Reads(2, 0)])


@torch.inference_mode()
def test_what_did_not_come_twice_is_not_recorded_nor_what_is_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Widths 1, 2 and 4, and room for two recordings, which stay."""
    monkeypatch.setattr(recorded_steps, "MOST_RECORDINGS", 2)
    target = recording(tiny.target(), PlainRecorder())
    cache = target.make_cache(2, 64)

    def replays(*widths: int) -> list[bool]:
        return [_replays(target, cache, width) for width in widths]

    assert replays(1, 1, 1, 2, 2, 2, 1) == [False, False, True, False, False, True, True]
    assert replays(4, 4, 4, 1, 2) == [False, False, False, True, True]


def _replays(target: TransformersTarget, cache: SlotCache, width: int) -> bool:
    assert target.recorded is not None
    before = target.recorded.replayed
    target.forward(cache, [Segment(1, 3, width)], [0] * width, [0])
    return target.recorded.replayed > before


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """What is let go must go at once, not when rubbish is next collected."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
@torch.inference_mode()
def test_a_cache_and_its_recordings_go_together() -> None:
    """The engine's cache wants the memory of the profile's."""
    target = recording(tiny.target(), TapeRecorder())
    cache = target.make_cache(2, 64)
    assert [_replays(target, cache, 1) for _ in range(3)] == [False, False, True]
    gone = [weakref.ref(cache), *map(weakref.ref, cache._keys.values()), *_recorded_over(target, cache)]

    del cache
    assert [one() for one in gone] == [None] * len(gone)


def _recorded_over(target: TransformersTarget, cache: SlotCache) -> list[weakref.ref[Any]]:
    """The one recording over a cache, and what it reads and writes."""
    assert target.recorded is not None
    [(step, _)] = target.recorded._shelves[cache].recordings.values()
    return _parts(step)


def _parts(step: StaticStep) -> list[weakref.ref[Any]]:
    return [weakref.ref(part) for part in (step, step._inputs, step._outputs.logits)]


def _no_room_beside(held: list[weakref.ref[Any]], patch: pytest.MonkeyPatch) -> None:
    """Let steps that are computed kernel by kernel find no memory while any of this is there."""
    compute = TransformersTarget._compute

    def short(self: TransformersTarget, plan: Plan, features: Any) -> Any:
        if isinstance(plan, StepPlan) and any(one() is not None for one in held):
            raise torch.OutOfMemoryError("no room")
        return compute(self, plan, features)

    patch.setattr(TransformersTarget, "_compute", short)


@pytest.mark.usefixtures("_no_collection")
@torch.inference_mode()
def test_recordings_make_room_for_a_step_that_finds_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt chunk that memory does not hold is computed again when they are gone."""
    target = recording(tiny.target(), TapeRecorder())
    cache = target.make_cache(2, 64)
    chunk = [Segment(0, 0, 30)], list(range(30)), [29]
    expected = target.forward(cache, *chunk)
    assert [_replays(target, cache, 1) for _ in range(3)] == [False, False, True]
    _no_room_beside(_recorded_over(target, cache), monkeypatch)

    assert torch.equal(target.forward(cache, *chunk).logits, expected.logits)
    assert [record.getMessage() for record in caplog.records] == [OFF + "memory ran out beside them: no room"]


class Notes(PlainRecorder):
    """Notes the parts of what it records, and may fail then."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self.parts: list[weakref.ref[Any]] = []

    def record(self, run: Callable[[], None]) -> Replay:
        self.parts += _parts(step_of(run))
        if self._fails:
            raise torch.OutOfMemoryError("no room")
        return super().record(run)


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.usefixtures("_no_collection")
@torch.inference_mode()
def test_a_recording_that_is_not_kept_makes_room_too(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that memory does not hold, and one beside which the step that it is compared with finds none."""
    recorder = Notes(fails=fails)
    target = recording(tiny.target(), recorder)
    cache = target.make_cache(2, 64)
    _no_room_beside(recorder.parts, monkeypatch)

    first, second = (target.forward(cache, [Segment(1, 3, 1)], [7], [0]) for _ in range(2))

    assert recorder.parts
    assert torch.equal(first.logits, second.logits)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(OFF + "recording a step of ")
    assert warning.endswith("failed: no room")


@torch.inference_mode()
def test_a_step_that_finds_no_memory_where_nothing_is_recorded_is_an_error_as_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing would be won by giving anything up."""
    target = recording(tiny.target(), PlainRecorder())
    cache = target.make_cache(2, 64)
    with monkeypatch.context() as patch:
        _no_room_beside([weakref.ref(cache)], patch)
        with pytest.raises(torch.OutOfMemoryError):
            target.forward(cache, [Segment(0, 0, 30)], list(range(30)), [29])

    assert [_replays(target, cache, 1) for _ in range(3)] == [False, False, True]
    assert not caplog.records


def test_where_memory_has_no_room_for_what_steps_give_nothing_is_recorded_and_no_slot_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for once, for the caches to come neither."""
    asked = []

    def refuse(*given: Any) -> Any:
        asked.append(given)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(transformers_target, "make_outputs", refuse)
    target = recording(tiny.target(), PlainRecorder())
    requests = make_requests(4, seed=4)

    for _ in range(2):
        engine = _engine(target)
        assert engine._scheduler._slots.working == 4
        assert run(engine, requests).keys() == {r.id for r in requests}
    assert len(asked) == 1
    assert [record.getMessage() for record in caplog.records] == [
        OFF + "there is no memory for what they give: no room"
    ]


def test_a_block_of_rows_is_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 copies of all logits of a wide step would take a gigabyte."""
    monkeypatch.setattr(recorded_steps, "COMPARED_ROWS", 3)
    generator = torch.Generator().manual_seed(2)
    found, expected = (torch.randn(8, 40, generator=generator) for _ in range(2))
    outputs = [StepOutput(logits, logits.argmax(-1), logits.logsumexp(-1)) for logits in (found, expected)]

    with Tape() as tape:
        divergence = recorded_steps._divergence(*outputs)

    known = functional.kl_div(found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none")
    torch.testing.assert_close(divergence, known.sum(-1))
    assert max(shape.numel() for _, shapes in tape.shapes for shape in shapes) == 3 * 40


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


@pytest.mark.usefixtures("eager_to_record")
def test_replays_tell_readers_what_computed_steps_tell_them() -> None:
    """Every token that stands, with what enters the layers there, wherever it lay in its step's bucket."""
    requests = make_requests(12, seed=4)
    told = []
    for target in (tiny.target(), recording(tiny.target(), TapeRecorder())):
        reader = Reads(2, 0, 3)
        answers = {request.id: tiny.generate(tiny.target(), request) for request in requests}
        oracle = NoisyOracle(answers, target.vocabulary)
        run(Engine(target, max_batch=4, drafters=[reader, oracle], prefix_cache=0), requests)
        told.append(reader.told)

    assert target.recorded is not None
    assert target.recorded.replayed > 5
    computed, replayed = told
    assert computed.keys() == replayed.keys() == {request.id for request in requests}
    for name, expected in computed.items():
        assert replayed[name].keys() == expected.keys()
        for position, (token, states) in expected.items():
            assert replayed[name][position][0] == token
            torch.testing.assert_close(replayed[name][position][1], states, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_other_layers_are_another_recording() -> None:
    """What is asked for is what is given, and what was not asked for is not."""
    target = recording(tiny.target(), TapeRecorder())
    cache = target.make_cache(2, 64)
    step = [Segment(1, 3, 2)], [7, 5], [1]
    asked: list[tuple[int, ...]] = [(), (2, 1), (1,), (), (2, 1), (1,), (), (2, 1), (1,)]

    given = [target.forward(cache, *step, features=layers).features for layers in asked]

    assert target.recorded is not None
    assert target.recorded.replayed == 3
    assert [None if one is None else tuple(one.shape[:2]) for one in given] == [None, (2, 2), (2, 1)] * 3
    for first, later in zip(given[1:3] * 2, [*given[4:6], *given[7:9]], strict=True):
        torch.testing.assert_close(later, first, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given[7][:, 1:], given[8], rtol=1e-4, atol=1e-4)


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
