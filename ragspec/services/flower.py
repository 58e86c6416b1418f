"""Flower, the page that shows Celery's nodes and tasks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from ragspec.interpreter import PYTHON
from ragspec.services.http import probe_http
from ragspec.services.part import Part
from ragspec.services.ports import LOOPBACK
from ragspec.services.secret import write_secret
from ragspec.settings import Settings

#: Flower 2.2 hides a task's arguments and result, and with them which shard it was, unless told otherwise.
COLUMNS = "name,uuid,state,args,kwargs,result,received,started,runtime,worker"
#: Upper bounds in seconds of the runtime histogram: a shard takes seconds to an hour, the default ends at 10 s.
BUCKETS = "0.1,0.5,1,2.5,5,10,30,60,120,300,600,1800,3600"


def flower_part(settings: Settings, port: int, log: Path, environment: Mapping[str, str]) -> Part:
    """Flower over loopback on `port`. With `RAGSPEC_FLOWER_PASSWORD` it asks for it; without, it lets loopback in."""
    url = f"http://{LOOPBACK}:{port}"
    # In the environment, which other users cannot read, and not among the arguments, which they can.
    secret = {"FLOWER_COOKIE_SECRET": _cookie_secret(settings.home / "flower" / "cookie-secret")}
    if settings.flower_password is not None:
        secret["FLOWER_BASIC_AUTH"] = f"{settings.flower_user}:{settings.flower_password.get_secret_value()}"
    options = (
        f"--address={LOOPBACK}",
        f"--port={port}",
        f"--tasks_columns={COLUMNS}",
        f"--task_runtime_metric_buckets={BUCKETS}",
        "--purge_offline_workers=60",
    )
    return Part(
        name="flower",
        command=(*PYTHON, "-m", "worker.command", "flower", *options),
        log=log,
        url=url,
        environment={**environment, **secret},
        probe=lambda _pid: probe_http(f"{url}/healthcheck"),
    )


def _cookie_secret(path: Path) -> str:
    """A secret kept from run to run, so that a restart logs nobody out."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_secret(path, secrets.token_urlsafe(48))
    return path.read_text()
