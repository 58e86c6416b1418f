"""Decode steps that were recorded, and when to trust them.

A bucket is recorded the second time a step falls into it, over buffers that hold nothing but padding; then its first replay, on
the step at hand, is compared with the same step computed kernel by kernel. So numbers that a recording froze show. That
step's answer is the compared one; later steps of the bucket are replays. Where a recording fails or says something else, the
target computes kernel by kernel for good. Steps that give the states between layers, for drafters that read them, are recorded
and compared with those: the layers asked for are part of the bucket.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragspec.decoding.attention import Segment
from ragspec.decoding.cache import SlotCache
from ragspec.decoding.recorder import Recorder, Replay
from ragspec.decoding.static_step import Bucket, Compute, Outputs, StaticStep, bucket_of
from ragspec.decoding.target import StepOutput

log = logging.getLogger(__name__)

#: Recordings of one cache. Further buckets are computed kernel by kernel: to let one recording go for another would mean to
#: record without end where steps fall into more buckets than that.
MOST_RECORDINGS = 64
#: Steps of a bucket until it is recorded: a shape that comes once may never come again.
RECORD_AT = 2
#: Rows of logits that are compared at once: float32 copies of a wide step's would take a gigabyte.
COMPARED_ROWS = 32
#: Largest distance between a replay's state between layers and the computed one, as a share of the latter's length, that is
#: rounding. In bfloat16 rounding makes some hundredths; another token's state, or none at all, is 1 and more away.
FEATURE_TOLERANCE = 0.3


@dataclass(frozen=True, slots=True)
class Step:
    """What `Target.forward` is asked for: see there."""

    segments: Sequence[Segment]
    tokens: Sequence[int]
    rows: Sequence[int]
    hidden: bool
    features: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Shelf:
    """The recordings over one cache."""

    outputs: Outputs
    recordings: dict[Bucket, tuple[StaticStep, Replay]] = field(default_factory=dict)
    asked: Counter[Bucket] = field(default_factory=Counter)


class _UnfitError(Exception):
    """A step cannot be recorded, or its recording says something else."""


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

    def attach(self, cache: SlotCache, make_outputs: Callable[[], Outputs]) -> None:
        """Record steps over this cache from now on; they are let go with it.

        Args:
            cache: where the sequences live.
            make_outputs: makes room for what steps give. Where memory has none, all goes on without recordings.
        """
        if self.given_up:
            return
        try:
            self._shelves[cache] = _Shelf(make_outputs())
        except RuntimeError as error:  # memory, in the allocator's words
            self._give_up(f"there is no memory for what they give: {error}")

    def run(self, cache: SlotCache, step: Step, compute: Compute, eagerly: Callable[[], StepOutput]) -> StepOutput:
        """A step, replayed where that is to be had.

        Args:
            cache: where the sequences live.
            step: what is asked.
            compute: the model's forward pass.
            eagerly: the step, computed kernel by kernel.

        Returns:
            What `eagerly` gives, or a replay the same within rounding; no later step writes over it.

        Raises:
            Exception: what `eagerly` raises, and not because of recordings; or what a replay raises whose recording was
                compared before, which is the device's own fault.
        """
        try:
            return self._run(cache, step, compute, eagerly)
        except _UnfitError as error:
            reason = str(error)
        except torch.OutOfMemoryError as error:
            # Recordings hold memory that the step may have been short of.
            if not any(shelf.recordings for shelf in self._shelves.values()):
                raise
            reason = f"memory ran out beside them: {error}"
        # Behind the handlers, because an error keeps alive whatever its calls held: buffers, graphs, half a step.
        self._give_up(reason)
        return eagerly()

    def _run(self, cache: SlotCache, step: Step, compute: Compute, eagerly: Callable[[], StepOutput]) -> StepOutput:
        shelf = self._shelves.get(cache)
        if shelf is None or not step.rows:
            return eagerly()
        bucket = bucket_of(step.segments, cache.slots, cache.capacity, step.features)
        if bucket is None:
            return eagerly()
        if (known := shelf.recordings.get(bucket)) is not None:
            self.replayed += 1
            return _replay(*known, step)
        shelf.asked[bucket] += 1
        if shelf.asked[bucket] < RECORD_AT or len(shelf.recordings) >= MOST_RECORDINGS:
            return eagerly()
        try:
            static = StaticStep(bucket, cache, shelf.outputs, shelf.outputs.logits.dtype)
            replay = self._recorder.record(lambda: static.run(compute))
            found = _replay(static, replay, step)
            self._recorder.settle()
            # The computed step comes last, so that what it writes into the cache is what stays there.
            expected = eagerly()
            if self._agrees(found, expected, bucket):
                shelf.recordings[bucket] = static, replay
        except Exception as error:
            msg = f"recording a step of {bucket} failed: {error}"
            raise _UnfitError(msg) from error
        return expected

    def _agrees(self, found: StepOutput, expected: StepOutput, bucket: Bucket) -> bool:
        """Whether a replay gave what was computed; False where that is not finite, which tells nothing of any recording.

        Raises:
            _UnfitError: it gave something else.
        """
        finite = expected.normalizers.isfinite()
        if not finite.any():
            return False
        if not torch.equal(found.choices, found.logits.argmax(-1)):
            msg = "its replay chooses other tokens than its own logits do"
            raise _UnfitError(msg)
        divergence = float(_divergence(found, expected)[finite].abs().max())
        if not divergence <= self._tolerance:
            msg = f"its replay diverges from the computed step by {divergence:.3g} nats"
            raise _UnfitError(msg)
        if expected.features is not None and not _alike(found.features, expected.features):
            msg = "its replay gives other states between layers than the computed step"
            raise _UnfitError(msg)
        log.debug("step recorded", extra={"action": "record_step", "bucket": bucket, "divergence_nats": divergence})
        return True

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


def _divergence(found: StepOutput, expected: StepOutput) -> Tensor:
    """Kullback-Leibler divergence of what was found from what was expected, in nats, at each row, [r]."""
    parts = []
    for start in range(0, len(expected.logits), COMPARED_ROWS):
        rows = slice(start, start + COMPARED_ROWS)
        wanted = expected.logits[rows].float() - expected.normalizers[rows, None]
        given = found.logits[rows].float() - found.normalizers[rows, None]
        parts.append((wanted.exp() * (wanted - given)).sum(-1))
    return torch.cat(parts)


def _alike(found: Tensor | None, expected: Tensor) -> bool:
    """Whether states between layers, [n, layers, hidden], are the same within rounding; what is not finite says nothing."""
    if found is None:
        return False
    wanted = expected.float()
    length = wanted.norm(dim=-1)
    close = (found.float() - wanted).norm(dim=-1) <= FEATURE_TOLERANCE * length
    return bool((close | ~length.isfinite()).all())
