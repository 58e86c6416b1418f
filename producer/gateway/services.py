"""What the gateway holds while it runs, and gives its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from fastapi import Request
from redis.asyncio import Redis
from sqlalchemy import Engine

from producer.gateway.asking import Asker
from producer.gateway.metrics import GatewayMetrics
from producer.gateway.replies import BLOCK_MS, ReplyReader
from ragspec.jobs.database import connect
from ragspec.queue import CONNECT_TIMEOUT_S, celery_app
from ragspec.settings import Settings


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that routes need.

    Attributes:
        settings: RAGSPEC_*.
        redis: for short questions to Redis.
        asker: asks the workers.
        metrics: of this process.
        database: knows the keys; None where none is configured.
    """

    settings: Settings
    redis: Redis
    asker: Asker
    metrics: GatewayMetrics
    database: Engine | None = None


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Services]:
    """The gateway's services, while it runs.

    Raises:
        ServiceUnavailableError: no Redis is configured.
    """
    url = settings.require_redis()
    redis = Redis.from_url(url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=CONNECT_TIMEOUT_S)
    listening = Redis.from_url(url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=2 * BLOCK_MS / 1000)
    replies = ReplyReader(listening)
    app = celery_app(settings)
    database = None if settings.database_url is None else connect(settings.require_database())
    reading = asyncio.create_task(replies.run())
    try:
        yield Services(settings, redis, Asker(app, redis, replies), GatewayMetrics(), database)
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await replies.close()
        await listening.aclose()
        await redis.aclose()
        app.close()
        if database is not None:
            database.dispose()


def services(request: Request) -> Services:
    """Those of the gateway that a request came to; for `Depends`."""
    found: Services = request.app.state.services
    return found
