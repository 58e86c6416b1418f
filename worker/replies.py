"""What goes from a worker to the gateways, and the one thing that comes from them: that nobody waits any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from ragspec.asking.events import KEPT_EVENTS, KEPT_S, Event
from ragspec.asking.message import CANCELLED, AskMessage, gone_key
from ragspec.errors import ServiceUnavailableError
from ragspec.queue import CONNECT_TIMEOUT_S
from worker.flag import Flag

log = logging.getLogger(__name__)

#: Seconds that the listener waits after Redis has hung up, and for a word in its channel before it looks around.
PAUSE_S = 1.0


class Replies:
    """Writes events into gateways' streams; may be shared by threads."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    def tell(self, message: AskMessage, *events: Event) -> None:
        """Write a question's next events, in one turn.

        Raises:
            ServiceUnavailableError: Redis does not take them.
        """
        pipeline = self._client.pipeline(transaction=False)
        for event in events:
            entry: dict[Any, Any] = {"id": message.id, "event": event.model_dump_json()}
            pipeline.xadd(message.reply_to, entry, maxlen=KEPT_EVENTS, approximate=True)
        pipeline.expire(message.reply_to, KEPT_S)
        try:
            pipeline.execute()
        except RedisError as error:
            raise ServiceUnavailableError(
                f"Redis does not take what question {message.id} came to: {error}."
            ) from error


class Cancellations:
    """Listens, in a thread of its own, for questions that nobody waits for any more."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._watched: dict[str, Flag] = {}
        threading.Thread(target=self._listen, name="cancellations", daemon=True).start()

    @contextmanager
    def watch(self, message: AskMessage) -> Iterator[Flag]:
        """A flag that is set when nobody waits for the question any more, also where that was said before."""
        flag = Flag()
        try:
            with self._lock:
                self._watched[message.id] = flag
            try:
                if self._client.exists(gone_key(message.id)):
                    flag.set()
            except RedisError as error:  # then its deadline ends it
                log.warning("whether somebody waits for question %s is not known: %s", message.id, error)
            yield flag
        finally:
            with self._lock:
                del self._watched[message.id]
            flag.close()

    def _listen(self) -> None:
        while True:
            try:
                with self._client.pubsub(ignore_subscribe_messages=True) as channel:  # type: ignore[no-untyped-call]
                    channel.subscribe(CANCELLED)
                    while True:
                        heard = channel.get_message(timeout=PAUSE_S)
                        if heard is not None:
                            self._cancel(heard["data"])
            except RedisError as error:
                log.warning("not listening for cancelled questions: %s", error)
                threading.Event().wait(PAUSE_S)

    def _cancel(self, name: bytes) -> None:
        with self._lock:
            flag = self._watched.get(name.decode(errors="replace"))
            if flag is not None and not flag.is_set():
                flag.set()


def connect(url: str) -> Redis:
    """A client for events and cancellations."""
    return Redis.from_url(url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=CONNECT_TIMEOUT_S)
