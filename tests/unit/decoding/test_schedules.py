"""Thousands of random schedules: every token of every answer is the target's own."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import tiny
from tests.unit.decoding import schedules

BLOCKS = 20
#: All blocks together make 5,000.
SCHEDULES_PER_BLOCK = 250
SCHEDULES_PER_FAMILY = 40


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_answer_of_a_random_schedule_is_the_targets_own(block: int) -> None:
    """The seeds are fixed, and a failure names the one that replays it."""
    reasons: Counter[str] = Counter()
    accepted = refused = 0
    for seed in range(block * SCHEDULES_PER_BLOCK, (block + 1) * SCHEDULES_PER_BLOCK):
        for completion in schedules.replay(seed).done.values():
            reasons[completion.finish_reason] += 1
            accepted += completion.acceptance.num_accepted_draft_tokens
            refused += completion.acceptance.num_draft_tokens - completion.acceptance.num_accepted_draft_tokens

    assert min(reasons[reason] for reason in ("stop", "stop_string", "length")) > 20
    assert min(accepted, refused) > 200


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_schedules_hold_for_every_family(family: str) -> None:
    """Grouped heads, biases, norms on queries, sliding windows, soft caps and sinks."""
    for seed in range(SCHEDULES_PER_FAMILY):
        schedules.replay(seed, family)
