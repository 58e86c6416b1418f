"""Whether the gateway is alive, and whether it can answer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from producer.gateway.access import Caller, caller
from producer.gateway.services import Services, services
from ragspec.asking.beat import WORKERS, fresh_workers

router = APIRouter()


@router.get("/healthz", summary="Alive")
async def healthz() -> dict[str, str]:
    """The gateway runs; nothing else is asked."""
    return {"status": "alive"}


@router.get("/readyz", summary="Able to answer", responses={503: {"description": "What is missing."}})
async def readyz(held: Annotated[Services, Depends(services)]) -> Response:
    """Redis answers, and a worker is there whose engine makes progress."""
    try:
        beats: Any = await held.redis.hgetall(WORKERS)
    except RedisError as error:
        return _not_ready({"redis": str(error)})
    if not (workers := fresh_workers(beats)):
        return _not_ready({"redis": "well", "worker": "none is there that makes progress"})
    return JSONResponse({"status": "ready", "workers": len(workers), "waiting": held.asker.waiting})


@router.get("/collections", summary="Names of the collections")
async def list_collections(who: Annotated[Caller, Depends(caller)]) -> dict[str, list[str]]:
    """What a question may search."""
    return {"collections": await who.collections()}


@router.get("/metrics", summary="For Prometheus", include_in_schema=False)
async def metrics(held: Annotated[Services, Depends(services)]) -> Response:
    """The metrics of this gateway."""
    held.metrics.running.set(held.asker.waiting)
    return Response(held.metrics.page(), media_type="text/plain; version=0.0.4")


def _not_ready(why: dict[str, Any]) -> JSONResponse:
    return JSONResponse({"status": "not_ready", **why}, 503)
