"""Asking one question: out through Celery, back through the stream, given up at the deadline or when nobody listens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from uuid import uuid4

import anyio.to_thread
from celery import Celery
from redis.asyncio import Redis
from redis.exceptions import RedisError

from producer.gateway.errors import GatewayError
from producer.gateway.replies import ReplyReader
from ragspec.asking.events import Delta, Event, Finished, Rejected, Started
from ragspec.asking.message import CANCELLED, AskMessage, gone_key
from ragspec.jobs.answer import Answer
from ragspec.jobs.options import AnswerOptions
from ragspec.queue import send_ask

log = logging.getLogger(__name__)

#: Seconds by which a gateway waits longer than it tells the worker to: the worker's own word is the better one.
GRACE_S = 0.5
#: Seconds that a question which was given up is remembered as such, beyond its deadline.
MEMORY_S = 5

_HINTS = {
    "deadline_exceeded": "Ask for fewer tokens, or raise `timeout`.",
    "engine_lost": "Ask again; `ragspec status` and the worker's log tell how it is.",
}


class Asker:
    """Sends questions and tells what becomes of them; lives in one event loop.

    Args:
        app: sends; its calls block, so they are made in threads.
        client: says what nobody waits for any more.
        replies: hears.
    """

    def __init__(self, app: Celery, client: Redis, replies: ReplyReader) -> None:
        self._app = app
        self._client = client
        self._replies = replies
        self._farewells: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Questions under way."""
        return self._replies.waiting

    async def answer(self, question: str, options: AnswerOptions, patience_s: float) -> Answer:
        """The answer to a question, whole.

        Raises:
            RagspecError: see `events`.
        """
        async with aclosing(self.events(question, options, patience_s, stream=False)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return event.answer
        msg = "the events ended without an answer"
        raise RuntimeError(msg)

    async def events(
        self, question: str, options: AnswerOptions, patience_s: float, *, stream: bool
    ) -> AsyncGenerator[Started | Delta | Finished]:
        """What becomes of a question, `Finished` last; closing the generator gives the question up.

        Nothing is told twice, however many workers began on it.

        Args:
            question: its text.
            options: what it is answered with.
            patience_s: seconds until nobody waits any more.
            stream: whether `Delta`s are wanted.

        Raises:
            GatewayError: the answer failed, or there is none in time; the code says why.
            ServiceUnavailableError: Redis does not take the question.
        """
        now = time.time()
        message = AskMessage(
            id=uuid4().hex,
            question=question,
            options=options,
            stream=stream,
            reply_to=self._replies.stream,
            sent_at=now,
            deadline=now + patience_s,
        )
        over = False
        with self._replies.listen(message.id) as queue:
            try:
                await anyio.to_thread.run_sync(send_ask, self._app, message)
                told = Told()
                while not over:
                    event = await self._next(queue, message)
                    over = isinstance(event, Finished | Rejected)
                    if isinstance(event, Rejected):
                        raise GatewayError(event.message, _HINTS.get(event.code, ""), code=event.code)
                    if isinstance(event, Finished):
                        raise_if_failed(event.answer)
                    fresh = told.only_fresh(event)
                    if fresh is not None:
                        yield fresh
            finally:
                if not over:
                    self._give_up(message)

    async def _next(self, queue: asyncio.Queue[Event], message: AskMessage) -> Event:
        try:
            async with asyncio.timeout(message.deadline + GRACE_S - time.time()):
                return await queue.get()
        except TimeoutError:
            raise GatewayError(
                "The answer was not there by its deadline.", _HINTS["deadline_exceeded"], code="deadline_exceeded"
            ) from None

    def _give_up(self, message: AskMessage) -> None:
        """Say so in a task of its own: whoever asked may be cancelled at this moment."""
        task = asyncio.get_running_loop().create_task(self._say_goodbye(message))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _say_goodbye(self, message: AskMessage) -> None:
        seconds = max(1, int(message.deadline - time.time()) + MEMORY_S)
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.set(gone_key(message.id), "", ex=seconds)
                pipeline.publish(CANCELLED, message.id)
                await pipeline.execute()
        except RedisError as error:
            log.warning("question %s runs on until its deadline: %s", message.id, error)


class Told:
    """How much was told of an answer that may begin anew with another worker."""

    def __init__(self) -> None:
        self._tokens = self._text = 0
        self._again_text = 0

    def only_fresh(self, event: Started | Delta | Finished) -> Started | Delta | Finished | None:
        """The event without what was told before; None where nothing is left of it."""
        if isinstance(event, Started):
            self._again_text = 0
            return event
        if isinstance(event, Finished):
            return event
        known = max(0, self._tokens - event.start)
        known_text = max(0, self._text - self._again_text)
        self._tokens = max(self._tokens, event.start + len(event.tokens))
        self._again_text += len(event.text)
        self._text = max(self._text, self._again_text)
        tokens, text = event.tokens[known:], event.text[known_text:]
        if not tokens and not text:
            return None
        return Delta(start=event.start + known, tokens=tokens, sources=event.sources[known:], text=text)


def raise_if_failed(answer: Answer) -> None:
    """Say why a question failed.

    Raises:
        GatewayError: it did. Where a collection is unknown the worker names all there are, and other tenants' are none of
            the caller's business.
    """
    if answer.status != "failed":
        return
    if answer.error_code == "unknown_collection":
        raise GatewayError("There is no such collection.", "GET /collections lists them.", code="unknown_collection")
    raise GatewayError(answer.error_message or "The question failed.", code=answer.error_code or "internal_error")
