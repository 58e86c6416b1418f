"""Answering one claimed shard: questions out to the engine, answers into PostgreSQL, signs of life in between."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.claims import Claim, ClaimedShard
from worker.drain import Drain
from worker.link import EngineLostError, Link
from worker.protocol import Answered, Ask, Begin, Failed

#: Questions of one shard that the engine holds, as a multiple of its batch: one batch decodes, one waits in the
#: engine, and the others gather for retrieval, so that no question is embedded on its own.
WINDOW_BATCHES = 4
#: Answers written together, and the longest that a finished one waits for company, seconds.
FLUSH_COUNT = 16
FLUSH_INTERVAL_S = 0.5

#: `done`: every question has its row. `lost`: another worker holds the shard now. The others leave rows unanswered.
Ending = Literal["done", "lost", "cancelled", "drained", "engine_lost"]


class Book(Protocol):
    """What a shard needs of PostgreSQL; `worker.ledger.Ledger`."""

    def unanswered(self, claim: Claim, batch: int) -> Iterator[list[Question]]: ...

    def record(self, claim: Claim, ready: Sequence[Answer]) -> int: ...

    def beat(self, claim: Claim) -> Literal["ok", "lost", "cancelled"]: ...


@dataclass(slots=True)
class Tally:
    """What one run over a shard wrote."""

    completed: int = 0
    failed: int = 0


class ShardRun:
    """One run over one claimed shard, in one thread."""

    def __init__(
        self, shard: ClaimedShard, link: Link, book: Book, drain: Drain, *, window: int, heartbeat_interval: float
    ) -> None:
        """Prepare a run.

        Args:
            shard: what was claimed, just now.
            link: a connection to the engine, the run's alone.
            book: PostgreSQL.
            drain: the node's wish to stop.
            window: questions that the engine holds of this shard at most; one where an earlier try was lost, so that
                those before the one that kills the engine, if one does, are answered first.
            heartbeat_interval: seconds between two signs of life.
        """
        self.tally = Tally()
        self._claim = shard.claim
        self._link = link
        self._book = book
        self._drain = drain
        self._window = window if shard.tries <= 1 else 1
        self._heartbeat_interval = heartbeat_interval
        self._begin = Begin(shard.options, time.monotonic(), str(shard.claim.job_id))
        self._outstanding: set[int] = set()
        self._ready: list[Answer] = []
        self._beat_at = time.monotonic() + heartbeat_interval
        self._flush_at = 0.0

    @property
    def outstanding(self) -> int:
        """Questions that the engine was asked and has not answered: any of them may be what it died of."""
        return len(self._outstanding)

    def run(self) -> Ending:
        """Answer what is unanswered, until all of it is or something ends the run.

        What the engine has answered is written in every case but `lost`.

        Raises:
            ServiceUnavailableError: PostgreSQL stays away.
            Exception: whatever else went wrong, once what the engine has answered is written.
        """
        try:
            ending = self._exchange()
        except EngineLostError:
            ending = "engine_lost"
        except ServiceUnavailableError:
            raise
        except Exception:
            self._flush()
            raise
        return ending if self._flush() else "lost"

    def _exchange(self) -> Ending:
        self._link.send(self._begin)
        questions = (one for batch in self._book.unanswered(self._claim, self._window) for one in batch)
        while self._ask(questions):
            drained, answered = self._wait()
            if drained:
                return "drained"
            if answered:
                self._receive()
            if self._due() and not self._flush():
                return "lost"
            if time.monotonic() >= self._beat_at:
                life = self._book.beat(self._claim)
                if life != "ok":
                    return life
                self._beat_at = time.monotonic() + self._heartbeat_interval
        return "done"

    def _ask(self, questions: Iterator[Question]) -> bool:
        """Fill the window; False where nothing is left to wait for."""
        asks = []
        while len(self._outstanding) < self._window and (question := next(questions, None)) is not None:
            self._outstanding.add(question.idx)
            asks.append(Ask(question))
        if asks:
            self._link.send(*asks)
        return bool(self._outstanding)

    def _wait(self) -> tuple[bool, bool]:
        """Sleep until the engine says something, the node drains or a duty is due."""
        until = min(self._beat_at, self._flush_at) if self._ready else self._beat_at
        pause = max(0.0, until - time.monotonic())
        sources: list[Drain | Link] = [self._drain, self._link]
        readable, _, _ = select.select(sources, [], [], pause)
        return self._drain in readable, self._link in readable

    def _receive(self) -> None:
        for frame in self._link.read():
            match frame:
                case Answered(answer=answer) if answer.idx in self._outstanding:
                    self._outstanding.remove(answer.idx)
                    if not self._ready:
                        self._flush_at = time.monotonic() + FLUSH_INTERVAL_S
                    self._ready.append(answer)
                case Failed(message=message):
                    raise EngineLostError(f"The engine failed: {message}.")
                case _:
                    raise EngineLostError(f"The engine sent {frame.kind}, which was not asked for.")

    def _due(self) -> bool:
        return len(self._ready) >= FLUSH_COUNT or (bool(self._ready) and time.monotonic() >= self._flush_at)

    def _flush(self) -> bool:
        """Write what is ready; False where the claim is lost."""
        ready, self._ready = self._ready, []
        if not ready:
            return True
        if self._book.record(self._claim, ready) == 0:
            return False
        failed = sum(answer.status == "failed" for answer in ready)
        self.tally.failed += failed
        self.tally.completed += len(ready) - failed
        return True
