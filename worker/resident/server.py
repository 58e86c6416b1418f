"""The resident process' socket: who asks what, and the way back for each answer and for what it grows by."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from itertools import count
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from ragspec.errors import InputError
from ragspec.jobs.answer import Answer, Question
from worker.protocol import (
    Answered,
    Ask,
    Begin,
    Failed,
    Frame,
    FrameBuffer,
    Grown,
    Hello,
    Ping,
    Pong,
    ProtocolError,
    encode,
)
from worker.resident.ticket import Ticket, issue

log = logging.getLogger(__name__)

READ_SIZE = 1 << 18
#: Questions that one connection may have outstanding; a client keeps far below.
MAX_OUTSTANDING = 4096
#: Owner only: whoever may write to the socket may spend the device.
SOCKET_UMASK = 0o177


class Answering(Protocol):
    """What the server needs of a pipeline."""

    def submit(self, ticket: Ticket) -> None: ...

    def refuse(self, ticket: Ticket, error: Exception) -> None: ...

    def forget(self, connection: int) -> None: ...

    def progress(self) -> Pong: ...


class Server:
    """Accepts connections on a Unix socket; lives in one event loop, `deliver` and `fail` come from any thread."""

    def __init__(self, model: str) -> None:
        self._hello = encode(Hello(model))
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, _Connection] = {}
        self._numbers = count(1)
        self._tickets = count(1)
        self._failure: asyncio.Future[None] = self._loop.create_future()

    def deliver(self, connection: int, answer: Answer) -> None:
        """Send an answer to whoever asked; dropped where they hung up."""
        self._loop.call_soon_threadsafe(self._answer, connection, answer)

    def tell(self, connection: int, grown: Grown) -> None:
        """Send whoever asked what an answer has grown by; dropped where they hung up."""
        self._loop.call_soon_threadsafe(self._grow, connection, grown)

    def fail(self, error: Exception) -> None:
        """Tell every connection that the engine cannot go on, and end `run` with the error."""
        self._loop.call_soon_threadsafe(self._break, error)

    def stop(self) -> None:
        """End `run`; called in the event loop."""
        if not self._failure.done():
            self._failure.set_result(None)

    async def run(self, path: Path, pipeline: Answering) -> None:
        """Serve until `stop`.

        Raises:
            Exception: what `fail` was told.
        """
        mask = os.umask(SOCKET_UMASK)
        try:
            server = await asyncio.start_unix_server(lambda r, w: self._serve(r, w, pipeline), path)
        finally:
            os.umask(mask)
        log.info("listening at %s", path)
        try:
            await self._failure
        finally:
            server.close()
            for connection in self._connections.values():
                connection.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pipeline: Answering) -> None:
        number = next(self._numbers)
        connection = self._connections[number] = _Connection(number, writer)
        writer.write(self._hello)
        buffer = FrameBuffer()
        try:
            while data := await reader.read(READ_SIZE):
                for frame in buffer.feed(data):
                    self._handle(connection, frame, pipeline)
        except ProtocolError as error:
            log.warning("connection %d closed: %s", number, error)
        except ConnectionError as error:
            log.info("connection %d broke: %s", number, error)
        finally:
            del self._connections[number]
            pipeline.forget(number)
            writer.close()

    def _handle(self, connection: _Connection, frame: Frame, pipeline: Answering) -> None:
        match frame:
            case Ping():
                connection.writer.write(encode(pipeline.progress()))
            case Begin():
                connection.begin = frame
            case Ask(question=question):
                self._ask(connection, question, pipeline)
            case _:
                msg = f"a client does not send {frame.kind}"
                raise ProtocolError(msg)

    def _ask(self, connection: _Connection, question: Question, pipeline: Answering) -> None:
        begin = connection.begin
        if begin is None or len(connection.outstanding) >= MAX_OUTSTANDING or question.idx in connection.outstanding:
            msg = "a question before its options, too many at once, or the same one twice"
            raise ProtocolError(msg)
        connection.outstanding.add(question.idx)
        number = next(self._tickets)
        try:
            pipeline.submit(_issue(number, connection, question, begin))
        except ValidationError as error:
            plain = Question(question.idx, question.custom_id, question.text)
            ticket = _issue(number, connection, plain, begin)
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            refusal = InputError(f"Option {where} of this row: {fault['msg']}.", code="bad_row_option")
            pipeline.refuse(ticket, refusal)

    def _answer(self, number: int, answer: Answer) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        connection.outstanding.discard(answer.idx)
        try:
            data = encode(Answered(answer))
        except ProtocolError as error:
            data = encode(
                Answered(Answer(answer.idx, "failed", error_code="answer_too_large", error_message=str(error)))
            )
        connection.writer.write(data)

    def _grow(self, number: int, grown: Grown) -> None:
        if connection := self._connections.get(number):
            connection.writer.write(encode(grown))

    def _break(self, error: Exception) -> None:
        if self._failure.done():
            return
        farewell = encode(Failed("engine_failed", f"{type(error).__name__}: {error}"))
        for connection in self._connections.values():
            with contextlib.suppress(RuntimeError):  # its transport is closing
                connection.writer.write(farewell)
        self._failure.set_exception(error)


class _Connection:
    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.writer = writer
        self.begin: Begin | None = None
        self.outstanding: set[int] = set()


def _issue(number: int, connection: _Connection, question: Question, begin: Begin) -> Ticket:
    return issue(
        number, connection.number, question, begin.options, begin.claimed_at, begin.job_id, stream=begin.stream
    )
