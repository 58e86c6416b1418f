"""Thousands of random schedules: every token of every answer is the target's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import tiny
from tests.unit.decoding import schedules

BLOCKS = 20
#: All blocks together make 5,000.
SCHEDULES_PER_BLOCK = 250
SCHEDULES_PER_FAMILY = 25
SCHEDULES_IN_EIGHT_BITS = 300

#: What happens so often at least in a block, or the block shows nothing.
LEAST = {
    "stop": 20,
    "stop_string": 20,
    "length": 20,
    "accepted": 80,
    "refused": 80,
    "prefix hits": 1000,
    "evictions": 3,
    "resumptions": 5,
    "job tokens": 5,
    "cuts": 20,
    "pauses": 20,
    "extended": 2,
    "fails before forward": 20,
    "fails after forward": 20,
    "fails before looking for stops": 8,
    "fails after looking for stops": 8,
    "fails before copying": 5,
    "fails after copying": 5,
    "RuntimeError": 25,
    "OutOfMemoryError": 25,
    "KeyboardInterrupt": 25,
}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_answer_of_a_random_schedule_is_the_targets_own(block: int) -> None:
    """The seeds are fixed, and a failure names the one that replays it."""
    seen: Counter[str] = Counter()
    for seed in range(block * SCHEDULES_PER_BLOCK, (block + 1) * SCHEDULES_PER_BLOCK):
        seen += schedules.replay(seed)

    assert {what: seen[what] for what in LEAST if seen[what] < LEAST[what]} == {}


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_schedules_hold_for_every_family(family: str) -> None:
    """Grouped heads, biases, norms on queries, sliding windows, soft caps and sinks."""
    for seed in range(SCHEDULES_PER_FAMILY):
        schedules.replay(seed, family)


def test_schedules_in_eight_bits_change_no_bit(kernels: Path) -> None:
    """Tokens and log-probabilities are those of the same target alone, one token a step, in a cache of its own."""
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES_IN_EIGHT_BITS):
        seen += schedules.replay(seed, "int8", kernels)

    assert {what: seen[what] for what in LEAST if seen[what] < 3} == {}
