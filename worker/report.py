"""What a worker says of itself to whoever looks: `RAGSPEC_HOME/run/worker-<host>-<pid>.json`, rewritten while it lives."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ragspec.services.home import worker_report

WorkerState = Literal["starting", "ready", "stopping"]


@dataclass(frozen=True, slots=True)
class Report:
    """One worker.

    Attributes:
        pid: the supervisor.
        state: `starting` also while the engine is being restarted.
        socket: the engine's Unix socket.
        model: the target's identity, empty until it is loaded.
        steps: engine steps since the engine started.
        updated_at: seconds since the epoch; one much older than 2 s means that the worker is gone.
    """

    pid: int
    state: WorkerState
    socket: str
    model: str
    steps: int
    updated_at: float


def write(home: Path, report: Report) -> None:
    """Write a report of this machine; a reader sees the old one or the new one."""
    path = worker_report(home, report.pid)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(report)) + os.linesep)
    draft.replace(path)


def remove(home: Path, pid: int) -> None:
    """Take the report of a worker of this machine away."""
    worker_report(home, pid).unlink(missing_ok=True)
