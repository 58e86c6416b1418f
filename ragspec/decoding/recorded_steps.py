"""Decode steps that were recorded, and when to trust them.

A bucket is recorded the second time a step falls into it, over buffers that hold nothing but padding; then its first replay, on
the step at hand, is compared with the same step computed kernel by kernel. So numbers that a recording froze show. That
step's answer is the compared one; later steps of the bucket are replays. Where a recording fails or says something else, the
target computes kernel by kernel for good.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.cache import SlotCache
from ragspec.decoding.recorder import Recorder, Replay
from ragspec.decoding.static_step import Bucket, Compute, Outputs, StaticStep, bucket_of
from ragspec.decoding.target import StepOutput

log = logging.getLogger(__name__)

#: Recordings of one cache; of more, the least recently used goes.
MOST_RECORDINGS = 64
#: Steps of a bucket until it is recorded: a shape that comes once may never come again.
RECORD_AT = 2


@dataclass(frozen=True, slots=True)
class Step:
    """What `Target.forward` is asked for: see there."""

    segments: Sequence[Segment]
    tokens: Sequence[int]
    rows: Sequence[int]
    hidden: bool


@dataclass(frozen=True, slots=True)
class _Shelf:
    """The recordings over one cache."""

    outputs: Outputs
    recordings: OrderedDict[Bucket, tuple[StaticStep, Replay]] = field(default_factory=OrderedDict)
    asked: Counter[Bucket] = field(default_factory=Counter)


class RecordedSteps:
    """The recorded steps of one target.

    Args:
        recorder: how they are recorded.
        tolerance: largest divergence from the computed step, KL in nats at any row, that is rounding.
    """

    def __init__(self, recorder: Recorder, tolerance: float) -> None:
        self._recorder = recorder
        self._tolerance = tolerance
        self._shelves: weakref.WeakKeyDictionary[SlotCache, _Shelf] = weakref.WeakKeyDictionary()
        #: Whether every step is computed kernel by kernel from now on.
        self.given_up = False
        #: Steps that were replayed, the compared ones left out.
        self.replayed = 0

    def attach(self, cache: SlotCache, outputs: Outputs) -> None:
        """Record steps over this cache from now on; they are let go with it."""
        if not self.given_up:
            self._shelves[cache] = _Shelf(outputs)

    def run(self, cache: SlotCache, step: Step, compute: Compute, eagerly: Callable[[], StepOutput]) -> StepOutput:
        """A step, replayed where that is to be had.

        Args:
            cache: where the sequences live.
            step: what is asked.
            compute: the model's forward pass.
            eagerly: the step, computed kernel by kernel.
        """
        shelf = self._shelves.get(cache)
        if shelf is None:
            return eagerly()
        try:
            return self._run(cache, shelf, step, compute, eagerly)
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # Recordings hold memory that the step may have been short of.
        self._give_up(reason)
        return eagerly()

    def _run(
        self,
        cache: SlotCache,
        shelf: _Shelf,
        step: Step,
        compute: Compute,
        eagerly: Callable[[], StepOutput],
    ) -> StepOutput:
        bucket = bucket_of(step.segments, cache.slots, cache.capacity)
        if bucket is None or not step.rows:
            return eagerly()
        if (known := shelf.recordings.get(bucket)) is not None:
            shelf.recordings.move_to_end(bucket)
            self.replayed += 1
            return _replay(*known, step)
        shelf.asked[bucket] += 1
        if shelf.asked[bucket] < RECORD_AT:
            return eagerly()
        static = StaticStep(bucket, cache, shelf.outputs, shelf.outputs.logits.dtype)
        try:
            replay = self._recorder.record(lambda: static.run(compute))
            found = _replay(static, replay, step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step can be computed
            self._give_up(f"recording a step of {bucket} failed: {error}")
            return eagerly()
        # The computed step comes last, so that what it writes into the cache is what stays there.
        expected = eagerly()
        if self._agrees(found, expected, bucket):
            shelf.recordings[bucket] = static, replay
            del shelf.asked[bucket]
            if len(shelf.recordings) > MOST_RECORDINGS:
                shelf.recordings.popitem(last=False)
        return expected

    def _agrees(self, found: StepOutput, expected: StepOutput, bucket: Bucket) -> bool:
        """Whether a replay gave what was computed. Rows that are not finite then tell nothing, of any recording."""
        finite = expected.normalizers.isfinite()
        if not finite.any():
            return False
        wanted = expected.logits[finite].float() - expected.normalizers[finite, None]
        given = found.logits[finite].float() - found.normalizers[finite, None]
        divergence = float((wanted.exp() * (wanted - given)).sum(-1).abs().max())
        consistent = torch.equal(found.choices, found.logits.argmax(-1))
        if consistent and divergence <= self._tolerance:
            log.debug("step recorded", extra={"action": "record_step", "bucket": bucket, "divergence_nats": divergence})
            return True
        self._give_up(f"the replay of {bucket} diverges from the computed step by {divergence:.3g} nats")
        return False

    def _give_up(self, reason: str) -> None:
        self.given_up = True
        self._shelves.clear()
        log.warning(
            "CUDA graphs are off from now on, and decode steps run kernel by kernel: %s",
            reason,
            extra={"action": "record_step"},
        )


def _replay(static: StaticStep, replay: Replay, step: Step) -> StepOutput:
    static.fill(step.segments, step.tokens, step.rows)
    replay()
    return static.output(len(step.rows), hidden=step.hidden)
