"""The worker's word to gateways that it makes progress, in a thread of its own: a slow Redis holds up no supervision."""

from __future__ import annotations

import logging
import threading
import time

from redis.exceptions import RedisError

from ragspec.asking.beat import WORKERS, Beat, fresh_workers
from worker.replies import connect

log = logging.getLogger(__name__)

#: Seconds between two beats, and after which another worker's silence is death.
INTERVAL_S = 2.0


class Heart:
    """Beats from `start` to `stop`, as long as it is told of progress.

    Args:
        url: Redis.
        name: the worker's.
    """

    def __init__(self, url: str, name: str) -> None:
        self._client = connect(url)
        self._name = name
        self._latest: Beat | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def told(self, beat: Beat) -> None:
        """The engine made progress, or has nothing to do."""
        self._latest = beat

    def stop(self) -> None:
        """Say that the worker is gone."""
        self._stopping.set()

    def _run(self) -> None:
        written: Beat | None = None
        while not self._stopping.wait(INTERVAL_S):
            latest = self._latest
            if latest is None or latest == written:
                continue
            try:
                self._client.hset(WORKERS, self._name, latest.dump())
                written = latest
                self._bury()
            except RedisError as error:
                log.warning("gateways do not hear of this worker: %s", error)
        try:
            self._client.hdel(WORKERS, self._name)
        except RedisError as error:
            log.info("gateways hear of this worker a little longer: %s", error)

    def _bury(self) -> None:
        """Take away those who died without a word."""
        fields: dict[bytes, bytes] = self._client.hgetall(WORKERS)  # type: ignore[assignment]  # of a client that blocks
        dead = fields.keys() - {name.encode() for name in fresh_workers(fields, time.time() - 60)}
        if dead:
            self._client.hdel(WORKERS, *dead)
