"""Who runs in the next step: continuous batching with chunked prompts.

Requests wait first come, first served, interactive ones ahead; a free slot is filled before each step. A step takes every
sequence that decodes (its last token and its draft) and, up to a chunk's worth, the prompts of those that do not yet.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass

from ragspec.decoding.request import Request
from ragspec.decoding.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A run of a sequence's prompt that a step carries along."""

    sequence: Sequence
    length: int

    @property
    def finishes_prompt(self) -> bool:
        """Whether the step brings the sequence's first token."""
        return self.sequence.cached + self.length == len(self.sequence.request.prompt)


class Scheduler:
    """Waiting and running requests.

    Args:
        slots: sequences that run at once.
        window: tokens of prompt and answer that a slot holds.
        prefill_chunk: prompt tokens a step carries at most.
    """

    def __init__(self, *, slots: int, window: int, prefill_chunk: int) -> None:
        self._window = window
        self._prefill_chunk = prefill_chunk
        self._free = list(range(slots))
        self._interactive: deque[tuple[Request, float]] = deque()
        self._bulk: deque[tuple[Request, float]] = deque()
        self._ids: set[str] = set()
        self.running: dict[str, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._interactive) + len(self._bulk)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._ids.add(request.id)
        (self._interactive if request.interactive else self._bulk).append((request, time.perf_counter()))

    def admit(self) -> list[Sequence]:
        """Give free slots, the lowest first, to those who wait."""
        admitted = []
        while self._free and self.waiting:
            request, added_at = (self._interactive or self._bulk).popleft()
            slot = heapq.heappop(self._free)
            limit = min(request.sampling.max_tokens, self._window - len(request.prompt))
            sequence = Sequence(request, slot, limit, added_at, time.perf_counter())
            self.running[request.id] = sequence
            admitted.append(sequence)
        return admitted

    def decoding(self) -> list[Sequence]:
        """Sequences whose prompt is in the cache."""
        return [s for s in self.running.values() if not s.prefilling]

    def prompt_chunks(self) -> list[PromptChunk]:
        """Prompt runs for the next step: interactive sequences first, then the oldest."""
        chunks = []
        room = self._prefill_chunk
        for sequence in sorted(self.running.values(), key=lambda s: not s.request.interactive):
            if sequence.prefilling and room > 0:
                length = min(room, len(sequence.request.prompt) - sequence.cached)
                chunks.append(PromptChunk(sequence, length))
                room -= length
        return chunks

    def remove(self, request_id: str) -> Sequence | None:
        """Take a request out, waiting or running; returns its sequence if it ran."""
        self._ids.discard(request_id)
        sequence = self.running.pop(request_id, None)
        if sequence is not None:
            heapq.heappush(self._free, sequence.slot)
            return sequence
        for queue in (self._interactive, self._bulk):
            for entry in queue:
                if entry[0].id == request_id:
                    queue.remove(entry)
                    return None
        return None

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._ids
