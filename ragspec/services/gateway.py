"""The HTTP gateway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ragspec.interpreter import PYTHON
from ragspec.services.http import probe_http
from ragspec.services.part import Part
from ragspec.services.ports import LOOPBACK


def gateway_part(port: int, log: Path, environment: Mapping[str, str]) -> Part:
    """The gateway over loopback on `port`."""
    url = f"http://{LOOPBACK}:{port}"
    return Part(
        name="gateway",
        command=(*PYTHON, "-m", "ragspec", "serve", f"--host={LOOPBACK}", f"--port={port}"),
        log=log,
        url=url,
        environment=environment,
        probe=lambda _pid: probe_http(f"{url}/healthz"),
    )
