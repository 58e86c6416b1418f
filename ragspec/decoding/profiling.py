"""Timing a target's forward passes at start, for the table that decides how wide to draft."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.memory import free_memory, plan_slots
from ragspec.decoding.step_cost import FREE, StepProfile
from ragspec.decoding.target import SlotKeeper, Target

log = logging.getLogger(__name__)

#: Rows of a sequence that are timed: a token alone, and drafts up to where rows have begun to cost a row each.
WIDTHS = (1, 2, 4, 8)
#: Wider passes than this are not timed beyond the first two widths: by then each row costs a row, and the line goes on.
MOST_ROWS = 64
#: Between two batch sizes that are timed lies this factor.
BATCH_STEP = 4
#: Rows of the longest prompt chunk that is timed, where the window allows, and the parts of it that are timed too.
LONGEST_CHUNK = 128
CHUNK_PARTS = (8, 2)
#: Tokens in the cache of each sequence, where the window allows.
CONTEXT = 512
#: Each pass is timed so often, and the fastest counts: what disturbs a pass only ever makes it slower.
REPEATS = 5


@torch.inference_mode()
def profile_steps(
    target: Target,
    *,
    max_batch: int,
    window: int,
    beside: Sequence[SlotKeeper] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> StepProfile:
    """Time decode passes by sequences and width, prompt chunks by rows, and what context adds.

    Takes some 75 passes at a batch of 16, in five rounds. The cache it reads is its own and holds zeros: a pass takes as long
    over them. It has as many slots as the engine will have, where memory does not hold `max_batch`, and is given back before
    the engine takes its own.

    Args:
        target: what is timed.
        max_batch: most sequences that decode together.
        window: tokens of prompt and answer, at least 2; the target's own limit caps it.
        beside: who else will keep something in every slot; memory is left for it.
        clock: seconds.

    Returns:
        The profile, or `FREE` with a warning where a pass fails.
    """
    began = clock()
    window = min(window, target.context_window)
    slot_bytes = sum(keeper.slot_bytes(window) for keeper in (target, *beside))
    slots = plan_slots(free_memory(target.device), slot_bytes, max_batch, 0.0).working
    try:
        profile = _profile(target, slots, window, clock)
    except RuntimeError as error:  # memory, in the allocator's words; the engine decodes all the same
        log.warning(
            "steps are not profiled, so every draft is verified whole: %s", error, extra={"action": "profile_steps"}
        )
        profile = FREE
    else:
        log.info("steps profiled in %.1f s", clock() - began, extra={"action": "profile_steps", "profile": profile})
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself does not look free to whoever plans the engine's slots
    return profile


def _profile(target: Target, slots: int, window: int, clock: Callable[[], float]) -> StepProfile:
    context = min(CONTEXT, window // 2, window - WIDTHS[1])
    widths = tuple(width for width in WIDTHS if context + width <= window)
    longest = min(LONGEST_CHUNK, window)
    chunk_rows = tuple(sorted({longest, *(max(1, longest // part) for part in CHUNK_PARTS)}))
    sequences = tuple(sorted({*_powers(slots), slots}))
    shapes = {
        count: [_decode(count, width, context) for width in widths if width <= 2 or count * width <= MOST_ROWS]
        for count in sequences
    }
    chunks = [_chunk(rows) for rows in chunk_rows]
    short = _decode(slots, 1, 1)
    # As many places as such a step reads in the engine's own slots.
    capacity = min(window, max(target.context_read(context + widths[-1]), longest))
    timer = _Timer(target, slots, capacity, clock)
    timer.time([shapes[1][0]])  # the first pass loads kernels and makes buffers
    # In rounds, not each shape's repeats in a row: what disturbs the machine for a moment then spoils one of them, not all.
    rounds = [
        timer.time([*(shape for row in shapes.values() for shape in row), *chunks, short]) for _ in range(REPEATS)
    ]
    best = {shape: min(times[shape] for times in rounds) for shape in rounds[0]}
    decode = tuple(tuple(best[shape] for shape in row) for row in shapes.values())
    # Padded steps differ by what they read, perhaps by nothing, and not by what is in the cache.
    longer = min(window, target.context_read(context + 1)) - min(window, target.context_read(2))
    return StepProfile(
        sequences=sequences,
        widths=widths,
        decode=decode,
        context=context,
        context_token=max(0.0, decode[-1][0] - best[short]) / (slots * longer) if longer > 0 else 0.0,
        chunk_rows=chunk_rows,
        chunk=tuple(best[chunk] for chunk in chunks),
    )


#: A pass: its segments, and the packed rows whose logits it reads.
_Shape = tuple[tuple[Segment, ...], tuple[int, ...]]


def _decode(sequences: int, width: int, context: int) -> _Shape:
    """A pass over so many sequences with so many rows each, all of whose logits are read."""
    return tuple(Segment(slot, context, width) for slot in range(sequences)), tuple(range(sequences * width))


def _chunk(rows: int) -> _Shape:
    """A pass over one prompt chunk at the beginning of a prompt."""
    return (Segment(0, 0, rows),), (rows - 1,)


class _Timer:
    """Forward passes over a cache of their own."""

    def __init__(self, target: Target, slots: int, capacity: int, clock: Callable[[], float]) -> None:
        self._target = target
        self._cache: Any = target.make_cache(slots, capacity)
        self._clock = clock

    def time(self, shapes: Iterable[_Shape]) -> dict[_Shape, float]:
        """Seconds of each pass, once."""
        seconds = {}
        for segments, rows in shapes:
            tokens = [0] * sum(segment.length for segment in segments)
            began = self._clock()
            # Reading the choices back is what a step does, and it waits for the device.
            self._target.forward(self._cache, list(segments), tokens, list(rows)).choices.tolist()
            seconds[segments, rows] = self._clock() - began
        return seconds


def _powers(most: int) -> list[int]:
    powers = [1]
    while powers[-1] * BATCH_STEP < most:
        powers.append(powers[-1] * BATCH_STEP)
    return powers
