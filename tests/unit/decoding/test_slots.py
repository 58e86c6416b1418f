"""Who gets which slot, and what survives of those before."""

from __future__ import annotations

import pytest

from ragspec.decoding.slots import SlotPool


class Memory:
    """Remembers per slot what text it would hold."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.cleared: list[int] = []
        self.fails = False

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        if self.fails:
            raise KeyboardInterrupt
        self.copies.append((source, destination, length))

    def clear(self, slot: int) -> None:
        self.cleared.append(slot)


def text(*parts: int) -> tuple[int, ...]:
    """100 tokens a part."""
    return tuple(part for part in parts for _ in range(100))


def run(pool: SlotPool, tokens: tuple[int, ...]) -> tuple[int, int]:
    """A sequence comes, computes what it does not find, and goes; its slot and what it found."""
    match = pool.find(tokens[:-1], {})
    assert match is not None
    slot = pool.take(tokens[:-1], match)
    pool.extend(slot, match.length, tokens[match.length :])
    pool.release(slot, tokens)
    return slot, match.length


def test_the_least_recently_used_prefix_goes_first() -> None:
    memory = Memory()
    pool = SlotPool(memory, working=1, keeping=2)
    for part in (1, 2, 3, 1):  # 1 is used again, so that 2 is the oldest when 3 needs a place
        run(pool, text(0, part, part))
    found = {part: pool.find(text(0, part, part), {}).length for part in (1, 2, 3)}

    assert found == {1: 300, 2: 100, 3: 300}


def test_sequences_compute_in_working_slots_only() -> None:
    pool = SlotPool(Memory(), working=2, keeping=5)

    assert {run(pool, text(part))[0] for part in range(20)} == {0, 1}


def test_a_prefix_in_a_slot_nobody_uses_is_continued_in_place() -> None:
    memory = Memory()
    pool = SlotPool(memory, working=1, keeping=4)
    run(pool, text(1, 2, 3, 4, 5, 6)[:-10])
    taken = run(pool, text(1, 2, 3, 4, 5, 7))

    assert taken == (0, 500)
    assert memory.copies == []  # what parts from it is too little to be kept


def test_a_running_donor_is_copied_and_stays() -> None:
    memory = Memory()
    pool = SlotPool(memory, working=2)
    first = pool.take(text(1, 2), pool.find(text(1, 2), {}))
    pool.extend(first, 0, text(1, 2))
    second = pool.take(text(1, 3), pool.find(text(1, 3), {}))

    assert memory.copies == [(first, second, 100)]


def test_a_prompt_waits_for_a_longer_prefix_that_is_being_computed_and_for_no_other() -> None:
    pool = SlotPool(Memory(), working=4)
    run(pool, text(1, 2))
    slot = pool.take((), pool.find((), {}))
    pool.extend(slot, 0, text(1, 2, 3))

    assert pool.find(text(1, 2, 3, 4), {slot: 0}) is None
    assert pool.find(text(1, 2, 3, 4), {slot: 290}).length == 290
    assert pool.find(text(1, 2, 4), {slot: 0}).length == 200  # the finished one has as much
    assert pool.find(text(1, 2, 3, 4), {}).length == 300


def test_a_wiped_slot_gives_nothing_and_neither_does_what_it_may_have_come_from() -> None:
    """A copied prefix can be what was wrong with it; running neighbours are left to their own fate."""
    memory = Memory()
    pool = SlotPool(memory, working=2, keeping=3)
    for part in (1, 2, 3):
        run(pool, text(part))
    running = pool.take((), pool.find((), {}))
    pool.extend(running, 0, text(4))
    failing = pool.take(text(1), pool.find(text(1), {}))
    pool.wipe(failing)

    assert running not in memory.cleared
    assert failing in memory.cleared
    assert [pool.find(text(part), {}).length for part in (1, 2, 3, 4)] == [0, 0, 0, 100]
    assert run(pool, text(5)) == (failing, 0)


def test_a_step_that_failed_leaves_no_promise() -> None:
    """Tokens that were announced but not computed are no prefix after their owner left."""
    pool = SlotPool(Memory(), working=2)
    slot = pool.take((), pool.find((), {}))
    pool.extend(slot, 0, text(1, 2))
    pool.release(slot, text(1))

    assert pool.find(text(1, 2), {}).length == 100


def test_without_reuse_nothing_is_found_or_copied() -> None:
    memory = Memory()
    pool = SlotPool(memory, working=1, reuse=False)

    assert [run(pool, text(1, 2)) for _ in range(3)] == [(0, 0)] * 3
    assert memory.copies == []


@pytest.mark.parametrize("wanted", [text(1, 2, 4), text(5)], ids=["in place", "elsewhere"])
def test_where_a_copy_fails_the_slot_is_given_the_next_time(wanted: tuple[int, ...]) -> None:
    """What lies in the slot is to be kept first, and that copy fails."""
    memory = Memory()
    pool = SlotPool(memory, working=1, keeping=1)
    run(pool, text(1, 2, 3))
    memory.fails = True
    with pytest.raises(KeyboardInterrupt):
        run(pool, wanted)
    memory.fails = False

    assert run(pool, wanted)[0] == 0
    assert (0, 1, 300) in memory.copies


def test_where_the_copy_of_a_prefix_fails_its_slot_stays_empty() -> None:
    memory = Memory()
    pool = SlotPool(memory, working=2)
    donor = pool.take((), pool.find((), {}))
    pool.extend(donor, 0, text(1))
    memory.fails = True
    with pytest.raises(KeyboardInterrupt):
        pool.take(text(1), pool.find(text(1), {}))
    memory.fails = False

    assert pool.find(text(1), {}).slots == (donor,)
    assert pool.take(text(1), pool.find(text(1), {})) == 1
