"""Who runs in the next step: continuous batching with chunked prompts.

Requests wait first come, first served, interactive ones ahead. A step takes every sequence that decodes (its last token and
its draft) and, up to a chunk's worth, the prompts of those that do not yet. A prompt gets its slot when it gets its first
chunk, not sooner, so that it finds in the cache what its neighbours computed in the step before.

Where nothing is free, an interactive request takes the place of a bulk one, which goes back to the head of its line.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from itertools import count

from ragspec.decoding.request import Request
from ragspec.decoding.sequence import NO_SLOT, Sequence
from ragspec.decoding.slots import SlotPool

#: How often one sequence gives way: then it is let finish, whoever waits.
MAX_PREEMPTIONS = 3


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A run of a sequence's prompt (and of its answer, where it was preempted) that a step carries along."""

    sequence: Sequence
    length: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """What is fed, [length]."""
        return self.sequence.text(self.sequence.cached, self.sequence.cached + self.length)

    @property
    def gives_first_token(self) -> bool:
        """Whether the answer's first token comes out of the step."""
        sequence = self.sequence
        return not sequence.tokens and sequence.cached + self.length == sequence.prefill_end


class Scheduler:
    """Waiting and running requests.

    Args:
        slots: where sequences compute; as many run at once as it has working slots.
        window: tokens of prompt and answer that a slot holds.
        prefill_chunk: prompt tokens a step carries at most.
    """

    def __init__(self, slots: SlotPool, *, window: int, prefill_chunk: int) -> None:
        self.prompt_tokens = 0
        self.prefix_hit_tokens = 0
        self._slots = slots
        self._window = window
        self._prefill_chunk = prefill_chunk
        self._arrivals = count()
        #: A heap by rank.
        self._line: list[tuple[tuple[bool, int], Sequence]] = []
        self._known: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Requests that do not run."""
        return len(self._line)

    def add(self, request: Request) -> None:
        """Queue a request."""
        limit = min(request.sampling.max_tokens, self._window - len(request.prompt))
        sequence = Sequence(request, next(self._arrivals), limit, time.perf_counter())
        self._known[request.id] = sequence
        heapq.heappush(self._line, (sequence.rank, sequence))

    def admit(self) -> list[Sequence]:
        """Let run who may, preempting where that helps; returns those that run for the first time."""
        fresh = []
        while self._line and (len(self.running) < self._slots.working or self._preempt()):
            _, sequence = heapq.heappop(self._line)
            self.running[sequence.request.id] = sequence
            if not sequence.preemptions:
                fresh.append(sequence)
        return fresh

    def prompt_chunks(self) -> list[PromptChunk]:
        """Prompt runs for the next step: interactive sequences first, then the oldest.

        A prompt that shares a long prefix with one that this step brings further waits for the next, and copies it then. It
        waits one step at most for each: where a chunk has room left for it, all before it end in this step.
        """
        chunks = []
        room = self._prefill_chunk
        growing: dict[int, int] = {}
        for sequence in sorted((s for s in self.running.values() if s.prefilling), key=lambda s: s.rank):
            if room == 0:
                break
            if sequence.slot == NO_SLOT and not self._begin(sequence, growing):
                continue
            length = min(room, sequence.prefill_end - sequence.cached)
            if length:
                chunk = PromptChunk(sequence, length)
                chunks.append(chunk)
                growing[sequence.slot] = sequence.cached
                self._slots.extend(sequence.slot, sequence.cached, chunk.tokens)
                room -= length
        return chunks

    def withdraw(self) -> None:
        """Take back what `prompt_chunks` announced, after a step that failed: nobody may copy keys that it did not compute."""
        for sequence in self.running.values():
            if sequence.slot != NO_SLOT:
                self._slots.cut(sequence.slot, sequence.cached)

    def decoding(self) -> list[Sequence]:
        """Sequences whose next step verifies a draft; to be asked after `prompt_chunks`, which may bring one up to there."""
        return [s for s in self.running.values() if not s.prefilling]

    def ended(self) -> list[Sequence]:
        """Sequences whose answer has ended, and which were not taken out yet."""
        return [s for s in self.running.values() if s.finish_reason is not None]

    def remove(self, request_id: str) -> Sequence | None:
        """Take a request out, waiting or running; returns its sequence if it ever ran."""
        sequence = self._known.pop(request_id, None)
        if sequence is None:
            return None
        if self.running.pop(request_id, None) is not None:
            self._leave(sequence)
            return sequence
        self._line = [entry for entry in self._line if entry[1] is not sequence]
        heapq.heapify(self._line)
        return sequence if sequence.preemptions else None

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._known

    def _preempt(self) -> bool:
        """Make room for the interactive request at the head of the line, if one is there and a bulk one may give way."""
        _, first = self._line[0]
        bulk = [s for s in self.running.values() if not s.request.interactive and s.preemptions < MAX_PREEMPTIONS]
        if not first.request.interactive or not bulk:
            return False
        # What it did is kept in its slot, but perhaps not for long: the least is risked. Of equals the last to come goes.
        victim = min(bulk, key=lambda s: (s.cached, -s.arrival))
        del self.running[victim.request.id]
        self._leave(victim)
        victim.preemptions += 1
        heapq.heappush(self._line, (victim.rank, victim))
        return True

    def _begin(self, sequence: Sequence, growing: dict[int, int]) -> bool:
        """Give a sequence a slot and the longest prefix there is; False where it waits for a longer one."""
        text = sequence.text(0, sequence.reusable)
        match = self._slots.find(text, growing)
        if match is None:
            return False
        sequence.slot = self._slots.take(text, match)
        sequence.cached = match.length
        if sequence.reused is None:
            sequence.started_at = time.perf_counter()
            sequence.reused = match.length
            self.prefix_hit_tokens += match.length
            self.prompt_tokens += len(sequence.request.prompt)
        return True

    def _leave(self, sequence: Sequence) -> None:
        if sequence.slot != NO_SLOT:
            if sequence.finish_reason == "error":
                self._slots.wipe(sequence.slot)
            else:
                self._slots.release(sequence.slot, sequence.text(0, sequence.cached))
        sequence.slot, sequence.cached = NO_SLOT, 0
