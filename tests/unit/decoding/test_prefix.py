"""The index finds what a search through every slot would find."""

from __future__ import annotations

import random
import sys

import pytest

from ragspec.decoding.prefix import BLOCK, Match, PrefixIndex


def shared(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_random_histories_agree_with_a_search_through_all() -> None:
    """Slots grow, are cut and forgotten; two tokens only, so that prefixes of every length are shared."""
    rng = random.Random(1)
    index = PrefixIndex()
    texts: dict[int, list[int]] = {slot: [] for slot in range(8)}
    lengths = set()
    for _ in range(3000):
        slot = rng.randrange(8)
        if rng.random() < 0.4:
            length = rng.randint(0, len(texts[slot]))
            index.cut(slot, length)
            del texts[slot][length:]
        else:
            other = texts[rng.randrange(8)]
            if not texts[slot] and rng.random() < 0.8:
                more = other[: rng.randint(0, len(other))]
            else:
                more = [rng.randrange(2) for _ in range(rng.randint(0, 40))]
            index.extend(slot, more)
            texts[slot] += more
        asked = [*rng.choice(texts), *(rng.randrange(2) for _ in range(rng.randint(0, 30)))]
        skip = {slot for slot in range(8) if rng.random() < 0.2}
        best = {slot: shared(asked, text) for slot, text in texts.items() if slot not in skip}
        longest = max(best.values(), default=0)
        found = index.longest(asked, skip)

        assert found.length == longest
        assert set(found.slots) == ({slot for slot, length in best.items() if length == longest} if longest else set())
        lengths.add(longest)

    assert len(lengths) > 3 * BLOCK
    for slot in range(8):
        index.cut(slot, 0)

    assert index.longest([0, 1]) == Match()
    assert not index._root.children


@pytest.mark.parametrize("slots", [4, 64])
def test_a_lookup_does_not_read_every_slot(slots: int) -> None:
    """Slots that part from the prompt early are not looked at further."""
    index = PrefixIndex()
    for slot in range(slots):
        index.extend(slot, [slot] * 400)
    asked = [3] * 300
    lines = 0

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = index.longest(asked)
    finally:
        sys.settrace(before)

    assert found == Match(300, (3,))
    assert lines < 4 * 300 // BLOCK + 4 * BLOCK + 20
