"""Who asks: an API key's tenant, or where the gateway is open the tenant `default`; and how much it may ask."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

import anyio.to_thread
from fastapi import Depends, Request
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import Engine
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producer.gateway.errors import GatewayError
from producer.gateway.services import Services, services
from ragspec.corpus.naming import owner_of, physical_name
from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.database import reachable
from ragspec.jobs.keys import authenticate
from ragspec.jobs.tenant import DEFAULT_TENANT, Limits, Tenant

#: Who asks without a key where none is needed. The limits that `default` may have hold for its jobs; without a database
#: nothing of it is known.
_ANYBODY = Tenant(DEFAULT_TENANT, "default", datetime.fromtimestamp(0, UTC), Limits())
#: In the request's state: the headers that its answer gets.
_HEADERS = "budget_headers"
_WINDOW_S = 60


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and whose collections are meant.

    Attributes:
        tenant: its tenant.
        held: the gateway's services.
    """

    tenant: Tenant
    held: Services

    async def collection(self, named: str | None) -> str:
        """What Chroma calls the collection that a question means: the named one, that of the settings, or the only one.

        Raises:
            GatewayError: none is named and it is not clear which is meant.
            InputError: no collection can be called so.
        """
        named = named or self.held.settings.gateway_collection
        if named is None:
            names = await self.collections()
            if len(names) != 1:
                found = f"there are {', '.join(names[:5])}" if names else "there is none"
                advice = "Name one." if names else "`ragspec ingest PATH --collection NAME` makes one."
                raise GatewayError(f"No collection is named, and {found}.", advice, code="bad_request", status=422)
            named = names[0]
        return physical_name(self.tenant.id, named)

    async def collections(self) -> list[str]:
        """The tenant's collections, in its own words."""
        return await anyio.to_thread.run_sync(_collections, self.held, self.tenant.id)


def own_name(physical: str) -> str:
    """What its tenant calls a collection of Chroma's."""
    owned = owner_of(physical)
    return physical if owned is None else owned[1]


async def caller(request: Request, held: Annotated[Services, Depends(services)]) -> Caller:
    """Whoever a request comes from; for `Depends`.

    Raises:
        GatewayError: the key is nobody's, or one is needed (401); the tenant has asked too often (429).
    """
    tenant = await _tenant(request.headers.get("authorization"), held)
    if tenant.limits.requests_per_minute is not None:
        await _count(request, held.redis, tenant, tenant.limits.requests_per_minute)
    return Caller(tenant, held)


async def _tenant(authorization: str | None, held: Services) -> Tenant:
    scheme, _, key = (authorization or "").partition(" ")
    open_to_all = held.settings.gateway_access == "open"
    if open_to_all and (authorization is None or not key.strip().startswith("rsk_")):
        return _ANYBODY  # OpenAI's clients always send a key; where none is needed, any other word will do
    if scheme.lower() != "bearer" or not key.strip():
        raise GatewayError(
            "This gateway asks for an API key.",
            "Send `Authorization: Bearer KEY`; `ragspec keys create` makes one.",
            code="missing_api_key",
            status=401,
        )
    if held.database is None:
        raise ServiceUnavailableError("No database is configured, which knows the keys.", "Set RAGSPEC_DATABASE_URL.")
    tenant = await anyio.to_thread.run_sync(_authenticate, held.database, key.strip())
    if tenant is None:
        raise GatewayError("This API key is not known, or was revoked.", code="invalid_api_key", status=401)
    return tenant


def _authenticate(database: Engine, key: str) -> Tenant | None:
    with reachable(database):
        return authenticate(database, key)


def _collections(held: Services, tenant_id: UUID) -> list[str]:
    from ragspec.corpus.store import open_store

    with open_store(held.settings) as store:
        owners = [owner_of(name) for name in store.names()]
    return sorted(owned[1] for owned in owners if owned is not None and owned[0] == tenant_id)


async def _count(request: Request, redis: Redis, tenant: Tenant, limit: int) -> None:
    """Count a request in this minute's window, for all gateways together."""
    now = _now()
    window = int(now // _WINDOW_S)
    reset_s = int((window + 1) * _WINDOW_S - now) + 1
    key = f"ragspec:rate:{tenant.id}:{window}"
    try:
        async with redis.pipeline(transaction=False) as pipeline:
            pipeline.incr(key)
            pipeline.expire(key, 2 * _WINDOW_S)
            count, _ = await pipeline.execute()
    except RedisError as error:
        raise ServiceUnavailableError(f"Redis does not answer: {error}.") from error
    headers = {
        "x-ratelimit-limit-requests": str(limit),
        "x-ratelimit-remaining-requests": str(max(0, limit - count)),
        "x-ratelimit-reset-requests": f"{reset_s}s",
    }
    if count > limit:
        headers["retry-after"] = str(reset_s)
    setattr(request.state, _HEADERS, headers)
    if count > limit:
        raise GatewayError(
            f"The tenant's requests_per_minute is {limit}.",
            f"Ask again in {reset_s} s.",
            code="rate_limited",
            status=429,
        )


def _now() -> float:
    return time.time()


class BudgetHeaders:
    """Puts what is left of the tenant's requests on every answer.

    Args:
        app: behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = scope.get("state", {}).get(_HEADERS, {})
                pairs = [(name.encode(), value.encode()) for name, value in found.items()]
                message = {**message, "headers": [*message.get("headers", []), *pairs]}
            await send(message)

        await self._app(scope, receive, with_headers)
