"""Timing a target's forward passes at start, for the table that decides how wide to draft."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.step_cost import StepProfile
from ragspec.decoding.target import Target

log = logging.getLogger(__name__)

#: Rows of a sequence that are timed: a token alone, and drafts up to where rows have begun to cost a row each.
WIDTHS = (1, 2, 4, 8)
#: Wider passes than this are not timed beyond the first two widths: by then each row costs a row, and the line goes on.
MOST_ROWS = 64
#: Between two batch sizes that are timed lies this factor.
BATCH_STEP = 4
#: Rows of a prompt chunk that are timed.
CHUNK_ROWS = (16, 64, 128)
#: Tokens in the cache of each sequence, where the window allows.
CONTEXT = 512
#: Each pass is timed so often, and the fastest counts: what disturbs a pass only ever makes it slower.
REPEATS = 2


@torch.inference_mode()
def profile_steps(
    target: Target, *, max_batch: int, window: int, clock: Callable[[], float] = time.perf_counter
) -> StepProfile:
    """Time decode passes by sequences and width, prompt chunks by rows, and what context adds.

    Takes some 30 passes. The cache it reads is its own and holds zeros: a pass takes as long over them.

    Args:
        target: what is timed.
        max_batch: most sequences that decode together.
        window: tokens of prompt and answer.
        clock: seconds.

    Raises:
        RuntimeError: the memory does not suffice.
    """
    began = clock()
    context = min(CONTEXT, max(1, window // 2))
    timer = _Timer(target, max_batch, context + max(CHUNK_ROWS), clock)
    sequences = tuple(sorted({*_powers(max_batch), max_batch}))
    timer.decode(1, 1, context)  # the first pass loads kernels and makes buffers
    decode = tuple(
        tuple(timer.decode(count, width, context) for width in WIDTHS if width <= 2 or count * width <= MOST_ROWS)
        for count in sequences
    )
    short = timer.decode(max_batch, 1, 1)
    profile = StepProfile(
        sequences=sequences,
        widths=WIDTHS,
        decode=decode,
        context=context,
        context_token=max(0.0, decode[-1][0] - short) / (max_batch * max(1, context - 1)),
        chunk_rows=CHUNK_ROWS,
        chunk=tuple(timer.chunk(rows) for rows in CHUNK_ROWS),
    )
    log.info("steps profiled in %.1f s", clock() - began, extra={"action": "profile_steps", "profile": profile})
    return profile


class _Timer:
    """Forward passes over a cache of their own."""

    def __init__(self, target: Target, slots: int, capacity: int, clock: Callable[[], float]) -> None:
        self._target = target
        self._cache: Any = target.make_cache(slots, capacity)
        self._clock = clock

    def decode(self, sequences: int, width: int, context: int) -> float:
        """Seconds of a pass over so many sequences with so many rows each, all of whose logits are read."""
        rows = list(range(sequences * width))
        return self._best([Segment(slot, context, width) for slot in range(sequences)], rows)

    def chunk(self, rows: int) -> float:
        """Seconds of a pass over one prompt chunk at the beginning of a prompt."""
        return self._best([Segment(0, 0, rows)], [rows - 1])

    def _best(self, segments: list[Segment], rows: list[int]) -> float:
        tokens = [0] * sum(segment.length for segment in segments)
        seconds = []
        for _ in range(REPEATS):
            began = self._clock()
            # Reading the choices back is what a step does, and it waits for the device.
            self._target.forward(self._cache, segments, tokens, rows).logits.argmax(-1).tolist()
            seconds.append(self._clock() - began)
        return min(seconds)


def _powers(most: int) -> list[int]:
    powers = [1]
    while powers[-1] * BATCH_STEP < most:
        powers.append(powers[-1] * BATCH_STEP)
    return powers
