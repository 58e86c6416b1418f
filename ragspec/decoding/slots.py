"""The slots of the cache: where a sequence computes, and what slots nobody computes in still hold.

The first `working` slots are computed in, so that the sequences of a step lie side by side however many prefixes are kept;
the slots behind them only keep. A sequence that leaves its slot leaves its keys there. Whoever takes the slot next first
moves them to a keeping slot, the least recently used, unless most of them are held elsewhere too; and copies the longest
prefix of its own text that any slot holds. Both are one copy a layer and never happen inside the forward pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from ragspec.decoding.prefix import BLOCK, Match, PrefixIndex
from ragspec.decoding.target import Cache

#: A text is moved to a keeping slot where at least this share of it is held nowhere else. Prompts of one passage set differ in
#: the question, some 150 of 700 tokens with the answer: keeping each of them would push out other passages for little.
WORTH_KEEPING = 0.25
#: Nobody shares a prefix.
NO_DONOR = -1


class SlotPool:
    """Gives slots and takes them back.

    Args:
        memory: the cache, of `working + keeping` slots.
        working: slots to compute in.
        keeping: slots that only keep prefixes.
        reuse: whether prefixes are kept and copied at all.
    """

    def __init__(self, memory: Cache, *, working: int, keeping: int = 0, reuse: bool = True) -> None:
        self.working = working
        self._memory = memory
        self._reuse = reuse
        self._index = PrefixIndex()
        self._empty = list(range(working))
        #: Working slots that nobody computes in but that hold a text, least recently used first; a dict keeps its order.
        self._idle: dict[int, None] = {}
        #: Keeping slots, the same.
        self._kept: dict[int, None] = dict.fromkeys(range(working, working + keeping))

    def find(self, text: Sequence[int], growing: Mapping[int, int]) -> Match | None:
        """The longest cached prefix of a text, or None where it pays to wait a step for a longer one.

        Args:
            text: tokens, as many as may come from the cache.
            growing: slots whose text this step will go on computing, and how much of it is computed already.
        """
        if not self._reuse:
            return Match()
        coming = self._index.longest(text)
        ready = tuple(slot for slot in coming.slots if growing.get(slot, coming.length) >= coming.length)
        if ready or not coming.slots:
            return Match(coming.length, ready)
        settled = self._index.longest(text, growing.keys())
        begun = max(coming.slots, key=lambda slot: growing[slot])
        now = max(settled, Match(growing[begun], (begun,)), key=lambda match: match.length)
        if coming.length - now.length >= BLOCK:
            return None
        return now if now.length else Match()

    def take(self, text: Sequence[int], match: Match) -> int:
        """A slot to compute in that holds the first `match.length` tokens of `text`; there must be one to give.

        Where a copy raises, no slot is taken and none seems to hold what it does not.
        """
        donor = self._donor(match)
        # In place where nothing is empty and the prefix lies in a slot that nobody computes in.
        if not self._empty and donor in self._idle:
            self._keep(donor, donor, match.length)
            self._index.cut(donor, match.length)
            del self._idle[donor]
            return donor
        if not self._empty:
            self._vacate(next(iter(self._idle)), donor)
        slot = self._empty[0]
        if match.length:
            self._memory.copy_prefix(donor, slot, match.length)
            self._index.extend(slot, text[: match.length])
        return heapq.heappop(self._empty)

    def extend(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """A slot's owner computes these tokens in this step, behind its first `start`."""
        if self._reuse:
            self._index.cut(slot, start)
            self._index.extend(slot, tokens)

    def cut(self, slot: int, length: int) -> None:
        """A slot's owner has computed no more than its first `length` tokens: the step that was to go on failed."""
        self._index.cut(slot, length)

    def release(self, slot: int, text: Sequence[int]) -> None:
        """A slot's owner leaves; `text` is what is cached of it."""
        known = min(self._index.length(slot), len(text))
        self.extend(slot, known, text[known:])
        if self._index.length(slot):
            self._idle[slot] = None
        else:
            heapq.heappush(self._empty, slot)

    def wipe(self, slot: int) -> None:
        """A slot's owner leaves, and what it computed is not to be trusted, nor whatever it may have been copied from."""
        for spoilt in (slot, *self._idle, *(kept for kept in self._kept if self._index.length(kept))):
            self._memory.clear(spoilt)
            self._index.cut(spoilt, 0)
        for empty in (slot, *self._idle):
            heapq.heappush(self._empty, empty)
        self._idle.clear()

    def _donor(self, match: Match) -> int:
        """Who of those that share a prefix gives it: where it costs no copy, else where the order of use changes least."""
        for slot in (*self._idle, *(slot for slot in match.slots if slot not in self._kept), *reversed(self._kept)):
            if slot in match.slots:
                self._touch(slot)
                return slot
        return NO_DONOR

    def _touch(self, slot: int) -> None:
        for order in (self._idle, self._kept):
            if slot in order:
                del order[slot]
                order[slot] = None

    def _vacate(self, slot: int, donor: int) -> None:
        """Empty the slot that was not used for longest, for one that gets its prefix from `donor`."""
        self._keep(slot, donor, 0)
        self._index.cut(slot, 0)
        del self._idle[slot]
        heapq.heappush(self._empty, slot)

    def _keep(self, slot: int, donor: int, held: int) -> None:
        """Move what a working slot holds to a keeping slot if it is worth it, but never over what is about to be copied.

        Its first `held` tokens stay where they are.
        """
        text = self._index.text(slot)
        elsewhere = max(held, self._index.longest(text, {slot}).length)
        oldest = next((kept for kept in self._kept if kept != donor), None)
        if oldest is None or len(text) - elsewhere < WORTH_KEEPING * len(text):
            return
        self._index.cut(oldest, 0)
        self._memory.copy_prefix(slot, oldest, len(text))
        self._index.extend(oldest, text)
        self._touch(oldest)
