"""The worker: the resident engine and its Celery nodes, under a supervisor of their own."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ragspec.errors import ServiceUnavailableError
from ragspec.interpreter import PYTHON
from ragspec.services.home import SOCKET_FOLDER, worker_report, worker_reports
from ragspec.services.part import Part
from ragspec.services.record import ProcessId
from ragspec.settings import Settings

#: Seconds until a worker has to be ready: on the first start it converts the model.
_START_TIMEOUT = 900.0
#: Seconds after which a worker that says nothing counts as hung; it speaks every 2 s.
_SILENCE = 30.0
#: Seconds that a stopping worker has beyond `shutdown_timeout`: two last graces of 6 s for nodes and engine.
STOP_MARGIN = 20.0


def worker_part(settings: Settings, log: Path, environment: Mapping[str, str]) -> Part:
    """A worker on this machine's device."""
    return Part(
        name="worker",
        command=(*PYTHON, "-m", "worker"),
        log=log,
        environment=environment,
        probe=lambda pid: probe_worker(settings.home, pid),
        start_timeout=_START_TIMEOUT,
        stop_timeout=settings.shutdown_timeout + STOP_MARGIN,
        death_signal=signal.SIGTERM,  # it takes its own children along
    )


def probe_worker(home: Path, pid: int) -> str | None:
    """None if this machine's worker with this process id is ready for questions, else what it is doing."""
    try:
        said = json.loads(worker_report(home, pid).read_text())
        state, model = said["state"], said.get("model")
    except (OSError, ValueError, TypeError, KeyError):
        return "starting"
    if state == "ready":
        return None
    return f"loading the model {model}" if model else "loading the model"


def forget_dead_workers(home: Path) -> None:
    """Take away what workers of this machine that were killed left behind: their reports, and their sockets' folders."""
    for pid, report in worker_reports(home):
        try:
            said = json.loads(report.read_text())
            socket, updated_at = Path(said["socket"]), float(said["updated_at"])
        except (OSError, ValueError, TypeError, KeyError):
            continue
        now = ProcessId.of("worker", pid)
        # One that was born after the report was written has got the number of the one that wrote it.
        if now and now.born < updated_at and now.find():
            continue
        if socket.parent.name.startswith(SOCKET_FOLDER):  # nothing else is deleted, whatever a report says
            if socket.is_socket():
                socket.unlink(missing_ok=True)
            with suppress(OSError):  # it is not there, or not empty
                socket.parent.rmdir()
        report.unlink(missing_ok=True)
        report.with_suffix(".tmp").unlink(missing_ok=True)


def require_ready_worker(home: Path) -> None:
    """See that a worker of this home is ready on this machine and has said so of late.

    Raises:
        ServiceUnavailableError: none has; says what they are doing.
    """
    doing = []
    for pid, report in worker_reports(home):
        silence = time.time() - report.stat().st_mtime
        waiting_for = f"silent for {silence:.0f} s" if silence > _SILENCE else probe_worker(home, pid)
        if waiting_for is None:
            return
        doing.append(f"process {pid}: {waiting_for}")
    raise ServiceUnavailableError(f"No worker of this machine is ready in {home}: {'; '.join(doing) or 'none runs'}.")
