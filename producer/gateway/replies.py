"""The way back: one reader of this gateway's Redis stream, which hands each event to whoever asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ragspec.asking.events import EVENTS, REPLIES, Event

log = logging.getLogger(__name__)

#: Milliseconds for which Redis holds a read of a stream in which nothing comes, and events read at once.
BLOCK_MS = 5000
BATCH = 500
#: Seconds to wait where Redis is away.
PAUSE_S = 0.5


class ReplyReader:
    """Reads the stream, and keeps nothing of it; lives in one event loop.

    Args:
        client: its connections wait longer for an answer than `BLOCK_MS`.
    """

    def __init__(self, client: Redis) -> None:
        self.stream = REPLIES + uuid4().hex
        self._client = client
        self._last = "0"
        self._waiting: dict[str, asyncio.Queue[Event]] = {}

    @property
    def waiting(self) -> int:
        """Questions whose events are waited for."""
        return len(self._waiting)

    @contextmanager
    def listen(self, name: str) -> Iterator[asyncio.Queue[Event]]:
        """The events of one question, as they come."""
        queue = self._waiting[name] = asyncio.Queue()
        try:
            yield queue
        finally:
            del self._waiting[name]

    async def run(self) -> None:
        """Read until cancelled; while Redis is away whoever waits sees the deadline."""
        while True:
            try:
                await self._read()
            except RedisError as error:
                log.warning("no answers come in: %s", error)
                await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """Take the stream away."""
        try:
            await self._client.delete(self.stream)
        except RedisError as error:
            log.info("the stream is left to its expiry: %s", error)

    async def _read(self) -> None:
        # redis-py types what every version of the protocol may give; ours gives [[stream, [(id, {field: value})]]].
        found: Any = await self._client.xread({self.stream: self._last}, count=BATCH, block=BLOCK_MS)
        for _, entries in found:
            for self._last, entry in entries:
                self._hand_on(entry)
            # An answer with its passages has tens of kilobytes: what was read is not kept.
            await self._client.xtrim(self.stream, minid=_behind(self._last), approximate=False)

    def _hand_on(self, entry: dict[bytes, bytes]) -> None:
        queue = self._waiting.get(entry.get(b"id", b"").decode(errors="replace"))
        if queue is None:
            return
        try:
            queue.put_nowait(EVENTS.validate_json(entry[b"event"]))
        except (KeyError, ValidationError) as error:
            log.warning("an entry of %s that is no event: %s", self.stream, error)


def _behind(entry_id: str | bytes) -> str:
    """The least id behind an entry's."""
    text = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    time, _, number = text.partition("-")
    return f"{time}-{int(number or 0) + 1}"
