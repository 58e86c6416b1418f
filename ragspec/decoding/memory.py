"""How many slots the device's free memory holds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ragspec.decoding.target import Cache, SlotKeeper, Target
from ragspec.errors import SettingsError

log = logging.getLogger(__name__)

#: Of the free memory, what slots may take together; the rest is for a step's activations and for neighbours.
USABLE = 0.9
#: Keeping slots for each working one at most: beyond what the prompts of one job share, and a lookup costs a block a slot.
KEEPING_PER_WORKING = 4


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """How many slots to make.

    Attributes:
        working: to compute in.
        keeping: to keep prefixes in.
    """

    working: int
    keeping: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.working + self.keeping


def plan_slots(free: int, slot_bytes: int, max_batch: int, keep_share: float) -> SlotPlan:
    """As many working slots as wanted, or as fit but at least one; then keeping slots.

    Args:
        free: bytes.
        slot_bytes: of one slot.
        max_batch: working slots wanted.
        keep_share: of the free memory for keeping slots, in [0, 1].
    """
    fit = int(USABLE * free) // slot_bytes if slot_bytes else max_batch
    working = max(1, min(max_batch, fit))
    affordable = min(int(keep_share * free) // slot_bytes, fit - working) if slot_bytes else 0
    return SlotPlan(working, max(0, min(affordable, KEEPING_PER_WORKING * working)))


@dataclass(frozen=True, slots=True)
class Caches:
    """The target's cache and those that follow it: what is copied or wiped in one is in all.

    Attributes:
        all: the target's first.
    """

    all: tuple[Cache, ...]

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Give `destination` the first `length` tokens that `source` holds."""
        for cache in self.all:
            cache.copy_prefix(source, destination, length)

    def clear(self, slot: int) -> None:
        """Wipe a slot whose numbers went wrong."""
        for cache in self.all:
            cache.clear(slot)


def reserve_slots(
    target: Target, max_batch: int, capacity: int, keep_share: float, beside: Sequence[SlotKeeper] = ()
) -> tuple[Caches, SlotPlan]:
    """The caches, of as many slots as are wanted or as the free memory holds.

    Args:
        target: whose cache is the first.
        max_batch: working slots wanted.
        capacity: tokens a slot holds.
        keep_share: of the free memory for keeping slots, in [0, 1].
        beside: who else keeps something in every slot, on the target's device.

    Raises:
        SettingsError: not even one slot fits.
    """
    keepers: list[SlotKeeper] = [target, *beside]
    slot_bytes = sum(keeper.slot_bytes(capacity) for keeper in keepers)
    plan = plan_slots(free_memory(target.device), slot_bytes, max_batch, keep_share)
    while True:
        try:
            caches = Caches(tuple(keeper.make_cache(plan.total, capacity) for keeper in keepers))
            break
        except RuntimeError as error:  # the allocator refuses what the system called free
            if plan.total == 1:
                msg = f"A cache of one sequence of RAGSPEC_CONTEXT_WINDOW={capacity} tokens does not fit: {error}"
                raise SettingsError(msg, "Lower it.") from error
            plan = SlotPlan(plan.working, 0) if plan.keeping else SlotPlan(plan.working // 2, 0)
    if plan.working < max_batch:
        log.warning(
            "free memory holds the cache of %d sequences of %d tokens, not of RAGSPEC_MAX_BATCH=%d; that many run at once",
            plan.working,
            capacity,
            max_batch,
            extra={"action": "reserve_slots", "slots": plan.working},
        )
    return caches, plan


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on a device; on CPU the container's limit counts too."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min([int(psutil.virtual_memory().available), *_left_by_cgroups()])


def _left_by_cgroups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Bytes left under each memory limit of this process' control groups (Linux, version 2), its own and those above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    left: list[int | None] = []
    for line in lines:
        number, _, path = line.partition("::")
        if number != "0":
            continue
        group = root / path.lstrip("/")
        left += [_left(folder) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return [one for one in left if one is not None]


def _left(group: Path) -> int | None:
    """Bytes left in a group; None where it has no limit. Its page cache counts as free: the kernel drops it first."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, limit - used + int(counters.get("inactive_file", 0)))
