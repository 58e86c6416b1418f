"""Too little memory makes the engine slow, never dead."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from ragspec.decoding import memory
from ragspec.decoding.engine import Engine
from ragspec.decoding.feature_drafter import make_head_drafter
from ragspec.decoding.head_drafter import LONGEST_DRAFT
from ragspec.decoding.memory import Caches, SlotPlan, free_memory, plan_slots
from ragspec.errors import SettingsError
from tests import tiny
from tests.unit.decoding import heads
from tests.unit.decoding.test_scheduling import make_requests, run
from tests.unit.decoding.test_slots import Memory


@pytest.mark.parametrize(
    ("free", "share", "plan"),
    [
        (10_000, 0.25, SlotPlan(16, 25)),
        (10_000, 0.0, SlotPlan(16, 0)),
        (10_000, 1.0, SlotPlan(16, 64)),
        (1_000, 0.25, SlotPlan(9, 0)),
        (2_000, 0.5, SlotPlan(16, 2)),
        (5, 0.25, SlotPlan(1, 0)),
    ],
)
def test_working_slots_come_first_and_one_there_always_is(free: int, share: float, plan: SlotPlan) -> None:
    assert plan_slots(free, 100, 16, share) == plan


def test_an_engine_with_memory_for_two_answers_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny.target()
    monkeypatch.setattr(memory, "free_memory", lambda _: int(2.5 * target.slot_bytes(512) / memory.USABLE))
    requests = make_requests(12, seed=2)
    with caplog.at_level(logging.WARNING):
        engine = Engine(target, max_batch=16)

    done = run(engine, requests)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == {r.id: tiny.generate(target, r) for r in requests}
    assert [record.message for record in caplog.records] == [
        "free memory holds the cache of 2 sequences of 512 tokens, not of RAGSPEC_MAX_BATCH=16; that many run at once"
    ]


def test_what_the_allocator_refuses_is_tried_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """First without kept prefixes, then with half the sequences."""
    target, tried = tiny.target(), []
    make = type(target).make_cache

    def refuse(self: object, slots: int, capacity: int) -> object:
        tried.append(slots)
        if slots > 2:
            raise RuntimeError("no room")
        return make(target, slots, capacity)

    monkeypatch.setattr(type(target), "make_cache", refuse)
    engine = Engine(target, max_batch=8)

    assert tried[1:] == [8, 4, 2]
    assert tried[0] > 8
    assert engine._scheduler._slots.working == 2


def test_a_device_that_holds_no_sequence_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise RuntimeError("no room")

    monkeypatch.setattr(type(tiny.target()), "make_cache", refuse)
    with pytest.raises(SettingsError, match="RAGSPEC_CONTEXT_WINDOW=512 tokens does not fit: no room"):
        Engine(tiny.target())


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    """The least of all groups above, page cache left out; what has no limit or no number does not count."""
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/box\n")
    for folder, limit, current, cache in (("pod", "5000", "1000", "300"), ("pod/box", "4000", "3000", "500")):
        group = tmp_path / "fs" / folder
        group.mkdir(parents=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(current)
        (group / "memory.stat").write_text(f"anon 9\ninactive_file {cache}\n")
    (tmp_path / "fs" / "memory.max").write_text("max")

    assert memory._left_by_cgroups(tmp_path / "fs", own) == [1500, 4300]
    assert memory._left_by_cgroups(tmp_path / "fs", tmp_path / "none") == []
    assert free_memory(torch.device("cpu")) > 0


def test_the_cache_of_a_head_that_attends_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is the target's and the head's, so of what holds three of the target's there is room for two of both."""
    target = tiny.target()
    drafter = make_head_drafter(heads.random_chain(target, "attention"))
    both = target.slot_bytes(512) + drafter.slot_bytes(512)
    assert drafter.slot_bytes(512) == (512 + LONGEST_DRAFT + 1) * 2 * 2 * 8 * 4
    monkeypatch.setattr(memory, "free_memory", lambda _: int(2.5 * both / memory.USABLE))

    assert Engine(target, max_batch=16, drafters=[drafter])._scheduler._slots.working == 2
    assert Engine(target, max_batch=16, drafters=[])._scheduler._slots.working == 3


def test_what_is_copied_or_wiped_in_one_cache_is_in_all() -> None:
    every = Memory(), Memory(), Memory()
    caches = Caches(every)
    caches.copy_prefix(1, 2, 30)
    caches.clear(4)

    assert [memory.copies for memory in every] == [[(1, 2, 30)]] * 3
    assert [memory.cleared for memory in every] == [[4]] * 3
