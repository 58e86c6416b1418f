"""Retrieval and decoding side by side: one thread prepares the next questions while another runs the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ragspec.decoding.request import Completion, Fresh, Request, Sampling
from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.answer import Answer
from worker.protocol import Grown, Pong
from worker.resident.feed import Feed
from worker.resident.lanes import Lanes
from worker.resident.outcome import Identity, Timing, answered, failed
from worker.resident.parts import Parts, TextWriter
from worker.resident.preparation import Preparation, Prepared
from worker.resident.silence import PATIENCE_S, Silence
from worker.resident.ticket import Ticket

log = logging.getLogger(__name__)

#: Most questions embedded and looked up in one go.
RETRIEVAL_BATCH = 32
#: Batches of bulk questions that wait with their prompts, so that those which begin alike find one another: some 25 kB of token
#: ids a question, and at the default batch four shards' worth.
LOOKAHEAD_BATCHES = 16


@dataclass(frozen=True, slots=True)
class _Running:
    prepared: Prepared
    added_at: float
    stream: TextWriter | None = None


class Pipeline:
    """Takes tickets, gives answers.

    Bulk questions wait in lanes, are prepared some batches ahead and enter the engine grouped by how their prompts begin, at
    most twice its batch at a time: it never starves, memory stays bounded, and an interactive question overtakes the rest.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        max_batch: int,
        answer_without_context: bool,
        deliver: Callable[[int, Answer], None],
        tell: Callable[[int, Grown], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Build the pipeline; nothing runs before `start`.

        Args:
            parts: what was loaded.
            max_batch: sequences that the engine decodes together.
            answer_without_context: whether a question with no passages is answered all the same.
            deliver: gives an answer to a connection; called from both threads.
            tell: tells a connection what an answer has grown by, where that was asked for, and before the answer.
            fail: told that one of the threads cannot go on.
        """
        self._engine = parts.engine
        self._identity = Identity(parts.model, parts.head, parts.prompts.template_hash)
        self._preparation = Preparation(parts.retriever, parts.prompts, self._identity, answer_without_context)
        self._deliver = deliver
        self._tell = tell
        self._make_stream = parts.stream
        self._fail = fail
        self._capacity = 2 * max_batch
        self._lookahead = LOOKAHEAD_BATCHES * max_batch
        self._refill = max(1, max_batch // 2)

        self._changed = threading.Condition()
        self._lanes = Lanes()
        self._silence = Silence(PATIENCE_S)
        self._open: dict[str, Ticket] = {}  # accepted and not yet answered
        self._prepared = Feed(group_limit=self._capacity)
        self._running: dict[str, _Running] = {}
        self._cancelled: list[str] = []
        self._moved_at = time.monotonic()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run_retrieval, name="retrieval", daemon=True),
            threading.Thread(target=self._run_engine, name="engine", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop both threads after what they are at; False where one is still busy after `timeout` seconds."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def submit(self, ticket: Ticket) -> None:
        """Take a question."""
        with self._changed:
            if not self._open:
                self._moved_at = time.monotonic()
            self._open[ticket.id] = ticket
            self._lanes.put(ticket)
            self._changed.notify_all()

    def refuse(self, ticket: Ticket, error: Exception) -> None:
        """Answer a question with an error at once."""
        self._deliver(ticket.connection, failed(ticket, error, self._identity))

    def forget(self, connection: int) -> None:
        """Drop everything a connection waits for."""
        with self._changed:
            gone = [ticket.id for ticket in self._open.values() if ticket.connection == connection]
            for ticket_id in gone:
                del self._open[ticket_id]
            self._lanes.drop(connection)
            self._silence.drop(connection)
            self._prepared.drop(connection)
            self._cancelled += [ticket_id for ticket_id in gone if ticket_id in self._running]
            self._changed.notify_all()

    def progress(self) -> Pong:
        """How far it is; never waits for the engine."""
        with self._changed:
            running = len(self._running)
            stalled_s = time.monotonic() - self._moved_at if self._open else 0.0
            waiting = len(self._open.keys() - self._running.keys())
        return Pong(self._engine.steps, waiting, running, stalled_s)

    # Retrieval thread

    def _run_retrieval(self) -> None:
        try:
            while tickets := self._next_tickets():
                for ticket, outcome in self._preparation.prepare(tickets):
                    match outcome:
                        case ServiceUnavailableError():
                            self._set_aside(ticket, outcome)
                        case Answer():
                            self._call_back(ticket)
                            self._finish(ticket, outcome)
                        case Prepared():
                            self._call_back(ticket)
                            self._pass_on(outcome)
        except Exception as error:
            log.exception("retrieval failed")
            self._fail(error)

    def _next_tickets(self) -> list[Ticket]:
        """Wait for questions that may be prepared, interactive ones first; [] where the process stops."""
        with self._changed:
            while not self._stopping.is_set():
                now = time.monotonic()
                taken = self._lanes.take(RETRIEVAL_BATCH, self._room())
                ready = [ticket for ticket in taken if not self._silence.holds_up(ticket, now)] + self._silence.due(now)
                if ready:
                    return sorted(ready, key=lambda ticket: not ticket.interactive)
                if not taken:
                    self._changed.wait(self._silence.pause(now))
        return []

    def _room(self) -> int:
        """How many bulk questions to prepare now: none until a batch worth retrieving fits, or all that wait do."""
        free = self._lookahead - self._prepared.bulk - self._silence.bulk
        return min(free, RETRIEVAL_BATCH) if free >= min(self._refill, self._lanes.bulk) else 0

    def _pass_on(self, prepared: Prepared) -> None:
        with self._changed:
            self._moved_at = time.monotonic()
            if prepared.ticket.id in self._open:
                self._prepared.put(prepared)
                self._changed.notify_all()

    def _set_aside(self, ticket: Ticket, error: ServiceUnavailableError) -> None:
        """Let a question wait for its store, and fail those that have waited long enough."""
        with self._changed:
            self._moved_at = time.monotonic()  # to ask again is life; that it ends is the patience's business
            given_up = self._silence.begin(ticket, self._moved_at) if ticket.id in self._open else []
        for late in given_up:
            self._finish(late, failed(late, error, self._identity, code="retrieval_failed"))

    def _call_back(self, ticket: Ticket) -> None:
        """The question's store answers: those that waited for it are next."""
        with self._changed:
            self._lanes.put_back(self._silence.end(ticket))

    # Engine thread

    def _run_engine(self) -> None:
        try:
            while self._exchange():
                steps = self._engine.steps
                done = self._engine.step()
                finished = {completion.request_id: completion for completion in done}
                for fresh in self._engine.fresh:
                    self._grow(fresh, finished.get(fresh.request_id))
                for completion in done:
                    self._complete(completion)
                if self._engine.steps > steps:  # a step that does nothing is no progress
                    with self._changed:
                        self._moved_at = time.monotonic()
        except Exception as error:
            log.exception("the engine failed")
            self._fail(error)

    def _exchange(self) -> bool:
        """Wait for work, then hand the engine what is new and take back what nobody waits for; False to stop."""
        with self._changed:
            while not (self._prepared or self._cancelled or self._engine.has_work or self._stopping.is_set()):
                self._changed.wait()
            if self._stopping.is_set():
                return False
            cancelled = [ticket_id for ticket_id in self._cancelled if self._running.pop(ticket_id, None)]
            self._cancelled.clear()
            ready = self._prepared.take(self._capacity - len(self._running))
            self._running |= {prepared.ticket.id: self._begun(prepared) for prepared in ready}
            if ready:
                self._changed.notify_all()  # there is room to prepare others
        for ticket_id in cancelled:
            self._engine.cancel(ticket_id)
        for prepared in ready:
            self._add(prepared)
        return True

    def _add(self, prepared: Prepared) -> None:
        ticket = prepared.ticket
        try:
            self._engine.add(_request(prepared))
        except Exception as error:  # noqa: BLE001 - one row's prompt never stops the others
            log.warning("question %s does not enter the engine: %s", ticket.question.custom_id, error)
            self._finish(ticket, failed(ticket, error, self._identity))

    def _begun(self, prepared: Prepared) -> _Running:
        options = prepared.ticket.options
        stream = self._make_stream(options.stop) if prepared.ticket.stream else None
        return _Running(prepared, time.monotonic(), stream)

    def _grow(self, fresh: Fresh, done: Completion | None) -> None:
        running = self._running.get(fresh.request_id)
        if running is None or running.stream is None:
            return
        text = running.stream.take(fresh.tokens) if done is None else running.stream.close(done.text)
        ticket = running.prepared.ticket
        grown = Grown(ticket.question.idx, fresh.start, list(fresh.tokens), list(map(int, fresh.sources)), text)
        self._tell(ticket.connection, grown)

    def _complete(self, completion: Completion) -> None:
        running = self._running[completion.request_id]
        ticket, prompt = running.prepared.ticket, running.prepared.prompt
        timing = Timing(running.added_at, running.prepared.retrieval_s)
        self._finish(ticket, answered(ticket, completion, prompt.used, timing, self._identity))

    # Both

    def _finish(self, ticket: Ticket, answer: Answer) -> None:
        with self._changed:
            self._moved_at = time.monotonic()
            self._running.pop(ticket.id, None)
            wanted = self._open.pop(ticket.id, None) is not None
            self._changed.notify_all()
        if wanted:
            self._deliver(ticket.connection, answer)


def _request(prepared: Prepared) -> Request:
    options = prepared.ticket.options
    return Request(
        id=prepared.ticket.id,
        prompt=prepared.prompt.token_ids,
        sampling=Sampling(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=prepared.ticket.seed,
            stop=options.stop,
            speculation=options.speculation,
            min_tokens=options.min_tokens,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=tuple(options.logit_bias.items()),
        ),
        passage_spans=prepared.prompt.passage_spans,
        interactive=prepared.ticket.interactive,
        group=prepared.ticket.job_id,
        stream=prepared.ticket.stream,
    )
