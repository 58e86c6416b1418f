"""The gateway as an ASGI application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producer.gateway import chat, generate, health
from producer.gateway.access import BudgetHeaders
from producer.gateway.errors import on_http_error, on_not_askable, on_ragspec_error, on_validation_error
from producer.gateway.services import Services, running
from producer.refusal import NotAskableError
from ragspec import __version__
from ragspec.errors import RagspecError
from ragspec.settings import Settings

#: Bytes of a request's body: the longest question, in the widest characters, with room for its options.
MAX_BODY = 1 << 20


def make_app(settings: Settings) -> FastAPI:
    """The application; its services run while it does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings) as held:
            app.state.services = held
            yield

    app = FastAPI(
        title="ragspec",
        version=__version__,
        description="Questions over your own documents, answered with lossless speculative decoding.",
        lifespan=lifespan,
        max_body_size=MAX_BODY,
    )
    for module in (generate, chat, health):
        app.include_router(module.router)
    app.add_exception_handler(RagspecError, on_ragspec_error)
    app.add_exception_handler(NotAskableError, on_not_askable)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_middleware(BudgetHeaders)
    app.add_middleware(Timed, services=lambda: app.state.services)
    return app


class Timed:
    """Observes how long each request took, by route and status, streams to their end.

    Args:
        app: behind it.
        services: whose metrics.
    """

    def __init__(self, app: ASGIApp, services: Callable[[], Services]) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            # What no route took has no label of its own: paths are whatever a client writes.
            route = getattr(scope.get("route"), "path", "none")
            self._services().metrics.latency.labels(route, str(status)).observe(time.perf_counter() - began)
