"""The Chroma server, from the `chromadb` wheel: one process owns the folder; two would not see each other's rows."""

from __future__ import annotations

from pathlib import Path

from ragspec.interpreter import PYTHON
from ragspec.services.http import probe_http
from ragspec.services.part import Part
from ragspec.services.ports import LOOPBACK, free_port

# What the wheel's `chroma` script does, less a second of imports.
_RUN = "import sys, chromadb_rust_bindings; chromadb_rust_bindings.cli(['chroma', 'run', *sys.argv[1:]])"


def chroma_part(folder: Path, log: Path) -> Part:
    """A Chroma server over loopback; its data lies in `folder`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = free_port()
    url = f"http://{LOOPBACK}:{port}"
    return Part(
        name="chroma",
        command=(*PYTHON, "-c", _RUN, "--path", str(folder), "--host", LOOPBACK, "--port", str(port)),
        log=log,
        url=url,
        environment={"ANONYMIZED_TELEMETRY": "False"},
        probe=lambda _pid: probe_chroma(url),
    )


def probe_chroma(url: str) -> str | None:
    """None if Chroma answers, else what it says."""
    return probe_http(url.rstrip("/") + "/api/v2/heartbeat")
