"""What a step takes: a table measured at start by sequences and width.

Only proportions matter: whether a draft row is worth verifying depends on what it adds to the step, relative to the
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step without its drafts.

    Attributes:
        sequences: that decode.
        context: tokens in the cache of each, the mean.
        prompt_rows: tokens of prompt chunks that ride along.
    """

    sequences: int
    context: float = 0.0
    prompt_rows: int = 0

    @property
    def without_prompts(self) -> StepLoad:
        """The same step with no prompt chunk in it."""
        return replace(self, prompt_rows=0)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Forward passes as they were timed, in seconds.

    Attributes:
        sequences: the batch sizes, rising.
        widths: rows of each sequence, rising, from 1.
        decode: of a pass over so many sequences with so many rows each, [sequences][widths]; at least the first two widths of
            each: from there on the line through the last two is taken.
        context: tokens in the cache of each sequence in those.
        context_token: what one more token in the cache of one sequence adds.
        chunk_rows: rows of a single prompt chunk, rising.
        chunk: of a pass over such a chunk, [chunk_rows].
    """

    sequences: tuple[int, ...]
    widths: tuple[int, ...]
    decode: tuple[tuple[float, ...], ...]
    context: int
    context_token: float
    chunk_rows: tuple[int, ...]
    chunk: tuple[float, ...]


#: Contexts that differ by less cost the same.
_CONTEXT_GRAIN = 16
#: Curves are kept until there are so many, and are at least so long.
_MOST_CURVES, _LEAST_CURVE = 256, 32
#: Nothing was measured; rows count as free, and all drafts are verified whole.
FREE = StepProfile((1,), (1, 2), ((1.0, 1.0),), 0, 0.0, (1, 2), (1.0, 1.0))


class StepCost:
    """Seconds of steps, interpolated in a profile.

    Args:
        profile: what was measured. More rows or more sequences never take less, and what disturbs a pass only makes it
            slower: so a pass that was timed slower than a larger one is taken to cost what the larger one did.
    """

    def __init__(self, profile: StepProfile = FREE) -> None:
        self._profile = profile
        full = [_along(np.array(profile.widths), profile.widths[: len(row)], np.array(row)) for row in profile.decode]
        self._decode: Floats = _ironed(_ironed(np.array(full), 0), 1)
        self._chunk: Floats = _ironed(np.array(profile.chunk), 0)
        #: By sequences, context in grains, and prompt rows.
        self._curves: dict[tuple[int, int, int], list[float]] = {}

    @property
    def profiled(self) -> bool:
        """Whether there is a profile at all."""
        return self._profile is not FREE

    def seconds(self, load: StepLoad, most: int) -> Floats:
        """Of a step with 0, 1, ..., `most` draft rows, [most + 1], never falling.

        Args:
            load: the step; at least one sequence.
            most: draft rows.
        """
        rows = load.sequences + np.arange(most + 1)
        seconds = self._decoding(load, rows / load.sequences)
        if load.prompt_rows:
            seconds = seconds + self._chunked(rows + load.prompt_rows) - self._chunked(rows)
        return np.maximum.accumulate(seconds)

    def curve(self, load: StepLoad, most: int) -> list[float]:
        """The same, at least so long, as plain numbers, out of what was asked before: one step is much like the next."""
        key = (load.sequences, round(load.context / _CONTEXT_GRAIN), load.prompt_rows)
        known = self._curves.get(key)
        if known is None or len(known) <= most:
            if len(self._curves) >= _MOST_CURVES:
                self._curves.clear()
            known = self._curves[key] = self.seconds(load, max(most, _LEAST_CURVE)).tolist()
        return known

    def _decoding(self, load: StepLoad, widths: Floats) -> Floats:
        """Of a step without prompt chunks, at each of `widths` rows a sequence."""
        known = self._profile.sequences
        place = float(np.interp(load.sequences, known, np.arange(len(known))))
        below = min(int(place), len(known) - 2) if len(known) > 1 else 0
        seconds = _along(widths, self._profile.widths, self._decode[below])
        if place > below:
            above = _along(widths, self._profile.widths, self._decode[below + 1])
            seconds = seconds + (place - below) * (above - seconds)
        longer = load.sequences * (load.context - self._profile.context) * self._profile.context_token
        shift: Floats = seconds + max(longer, -0.9 * float(seconds[0]))
        return shift

    def _chunked(self, rows: Floats | NDArray[np.int64]) -> Floats:
        return _along(rows, self._profile.chunk_rows, self._chunk)


def _ironed(values: Floats, axis: int) -> Floats:
    """Never above what comes later along an axis."""
    ironed: Floats = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return ironed


def _along(wanted: Floats | NDArray[np.int64], places: Sequence[int], values: Floats) -> Floats:
    """Linear interpolation, and beyond the last place the line through the last two."""
    inside: Floats = np.interp(wanted, places, values)
    slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    line: Floats = inside + np.maximum(wanted - places[-1], 0) * slope
    return line
