"""Answering one question that somebody waits for: from its message to the events in its gateway's stream."""

from __future__ import annotations

import logging
import os
import platform
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import ValidationError

from ragspec.asking.events import Delta, Finished, Rejected, Started
from ragspec.asking.message import AskMessage
from ragspec.decoding.acceptance import Source
from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.answer import Question
from ragspec.queue import ASK, send_ask
from ragspec.settings import Settings, settings
from worker.app import app
from worker.drain import Drain, node_drain
from worker.flag import Flag
from worker.link import EngineLostError, Link
from worker.protocol import Answered, Ask, Begin, Failed, Frame, Grown
from worker.replies import Cancellations, Replies, connect

log = logging.getLogger(__name__)

#: Engines that a question may lose: it may be what they die of.
MAX_LOST_ENGINES = 2
#: Seconds that one waits for an engine to greet, and between two looks for one.
ENGINE_PATIENCE_S = 5.0
ENGINE_RETRY_S = 0.25

#: How a question's stay with a worker ends. All but `answered` and `drained` are codes of `Rejected` too.
Ending = Literal["answered", "drained", "deadline_exceeded", "cancelled", "engine_lost"]

_REASONS: dict[Ending, str] = {
    "deadline_exceeded": "The answer was not there by its deadline.",
    "cancelled": "Nobody waits for the answer any more.",
    "engine_lost": "The engine went away; perhaps it was this question.",
}


@app.task(name=ASK)  # type: ignore[untyped-decorator]  # celery ships no types
def ask(message: dict[str, Any]) -> str:
    """Answer one question of a gateway."""
    try:
        asked = AskMessage.model_validate(message)
    except ValidationError as error:
        fault = error.errors()[0]
        log.warning("a message that asks nothing: %s: %s", ".".join(map(str, fault["loc"])), fault["msg"])
        return "not a question"
    config, drain = settings(), node_drain()
    replies = _replies()
    try:
        with _cancellations().watch(asked) as gone:
            ending = AskRun(asked, replies, drain, gone, config).run()
        if ending == "drained":
            send_ask(app, asked)
        elif ending != "answered":
            replies.tell(asked, Rejected(code=ending, message=_REASONS[ending]))
    except ServiceUnavailableError as error:
        log.warning("question %s is dropped: %s", asked.id, error)
        return "dropped: no Redis"
    return ending


@dataclass(frozen=True, slots=True)
class AskRun:
    """One question's stay with this worker, in one thread.

    Attributes:
        message: what was asked.
        replies: where its events go.
        drain: the node's wish to stop.
        gone: set when nobody waits any more.
        config: where the engine is.
    """

    message: AskMessage
    replies: Replies
    drain: Drain
    gone: Flag
    config: Settings

    def run(self) -> Ending:
        """Answer it, or find out why not.

        Raises:
            ServiceUnavailableError: Redis does not take the events.
        """
        for _ in range(MAX_LOST_ENGINES):
            link = self._reach_engine()
            if not isinstance(link, Link):
                return link
            with link:
                try:
                    return self._exchange(link)
                except EngineLostError as error:
                    log.warning("question %s: %s", self.message.id, error)
        return "engine_lost"

    def _reach_engine(self) -> Link | Ending:
        path = self.config.engine_socket
        while (ended := self._ended()) is None:
            if path is None:
                return "engine_lost"
            try:
                return Link(path, timeout=min(ENGINE_PATIENCE_S, max(0.01, self._left())))
            except EngineLostError:
                self._wait(ENGINE_RETRY_S)
        return ended

    def _exchange(self, link: Link) -> Ending:
        message = self.message
        self.replies.tell(message, Started(worker=f"{platform.node()}:{os.getpid()}", model=link.model))
        link.send(
            Begin(message.options, time.monotonic(), job_id=None, stream=message.stream),
            Ask(Question(0, message.id, message.question)),
        )
        while (ended := self._ended()) is None:
            if self._wait(self._left(), link):
                events, answered = _events(link.read())
                if events:
                    self.replies.tell(message, *events)
                if answered:
                    return "answered"
        return ended

    def _left(self) -> float:
        """Seconds until the deadline."""
        return self.message.deadline - time.time()

    def _ended(self) -> Ending | None:
        """What has happened to it meanwhile."""
        if self.gone.is_set():
            return "cancelled"
        if self._left() <= 0:
            return "deadline_exceeded"
        return "drained" if self.drain.begun() else None

    def _wait(self, seconds: float, link: Link | None = None) -> bool:
        """Sleep until something has happened; whether the engine said something."""
        poll = select.poll()
        sources: list[Flag | Link] = [self.drain, self.gone]
        if link is not None:
            sources.append(link)
        for source in sources:
            poll.register(source, select.POLLIN)
        ready = {number for number, _ in poll.poll(max(0.0, seconds) * 1000)}
        return link is not None and link.fileno() in ready


def _events(frames: Iterable[Frame]) -> tuple[list[Delta | Finished], bool]:
    """What frames of the engine say, and whether the answer is among them; neighbouring deltas are one.

    Raises:
        EngineLostError: it failed, or sent what was not asked for.
    """
    events: list[Delta | Finished] = []
    for frame in frames:
        match frame:
            case Grown():
                sources = [Source(number).name.lower() for number in frame.sources]
                delta = Delta(start=frame.start, tokens=frame.tokens, sources=sources, text=frame.text)
                if events and isinstance(last := events[-1], Delta):
                    events[-1] = last.followed_by(delta)
                else:
                    events.append(delta)
            case Answered(answer=answer):
                events.append(Finished(answer=answer))
            case Failed(message=message):
                raise EngineLostError(f"The engine failed: {message}.")
            case _:
                raise EngineLostError(f"The engine sent {frame.kind}, which was not asked for.")
    return events, any(isinstance(event, Finished) for event in events)


@cache
def _replies() -> Replies:
    return Replies(connect(settings().require_redis()))


@cache
def _cancellations() -> Cancellations:
    return Cancellations(connect(settings().require_redis()))
