"""One device: the resident engine process, one Celery node a queue, and the watch over both."""

from __future__ import annotations

import logging
import os
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ragspec.asking.beat import FRESH_S, Beat
from ragspec.interpreter import PYTHON
from ragspec.queue import ASKS, CONTROL
from ragspec.services.home import SOCKET_FOLDER, run_folder
from ragspec.services.preflight import check_worker
from ragspec.services.worker import forget_dead_workers
from ragspec.settings import Settings, child_environment
from worker import report
from worker.child import Child
from worker.heart import Heart
from worker.link import EngineLostError, Link
from worker.protocol import Ping, Pong

log = logging.getLogger(__name__)

RESIDENT = (*PYTHON, "-m", "worker.resident")
NODE = (*PYTHON, "-m", "worker.node")

#: Seconds between two looks at the processes, two pings and two reports.
TICK_S = 0.25
PING_INTERVAL_S = 1.0
REPORT_INTERVAL_S = 1.0
#: Seconds that the resident has to stop after SIGTERM, and the kernel to bury what SIGKILL ended.
LAST_GRACE_S = 6.0
#: The engine's socket, in a folder of its own.
SOCKET = "engine.sock"
#: Longest path, in bytes, of that folder's parent: macOS takes 104 for a socket's whole path, its NUL included.
MAX_SOCKET_PARENT = 70


def run(settings: Settings, resident: Sequence[str] = RESIDENT) -> int:
    """Supervise until SIGTERM, SIGINT or SIGHUP; call it from the main thread.

    Args:
        settings: what this worker runs with; its processes read the same environment.
        resident: the command of the resident process.

    Returns:
        The exit status: 0, or the resident's where it can never become ready.

    Raises:
        SettingsError: a setting is known to be wrong before anything is started.
    """
    check_worker(settings)
    run_folder(settings.home).mkdir(parents=True, exist_ok=True)
    forget_dead_workers(settings.home)
    # Of the owner alone, and of this process alone: containers that share a home may share process ids too.
    with tempfile.TemporaryDirectory(prefix=SOCKET_FOLDER, dir=_socket_parent()) as folder:
        try:
            return _Supervisor(settings, resident, Path(folder) / SOCKET).run()
        finally:
            report.remove(settings.home, os.getpid())


def _socket_parent() -> Path:
    """The folder for temporary files, unless its path is too long for a socket in it."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= MAX_SOCKET_PARENT else Path("/tmp")  # noqa: S108 - only a parent


class _Supervisor:
    def __init__(self, settings: Settings, resident: Sequence[str], socket: Path) -> None:
        self._settings = settings
        self._socket = socket
        self._state: report.WorkerState = "starting"
        self._stop = threading.Event()
        self._hurry = False
        self._model = ""
        self._steps = 0
        self._reported_at = 0.0

        environment = child_environment(engine_socket=socket)
        parent = f"--parent={os.getpid()}"
        self._resident = Child("resident", [*resident, f"--socket={socket}", parent], environment)
        self._watch = _Watch(socket, settings.engine_timeout)
        self._heart: Heart | None = None
        concurrency = {
            "bulk": settings.bulk_concurrency,
            "interactive": settings.interactive_concurrency,
            ASKS: settings.ask_concurrency,
            CONTROL: 1,
        }
        self._nodes = [
            Child(
                f"{queue} node",
                [
                    *NODE,
                    f"--queue={queue}",
                    f"--concurrency={in_flight}",
                    f"--pool={'threads' if queue == ASKS else 'prefork'}",
                    f"--name=ragspec-{queue}-{os.getpid()}@%h",
                    parent,
                ],
                environment,
            )
            for queue, in_flight in concurrency.items()
        ]

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        status = 0
        try:
            self._resident.start()
            while not self._stop.wait(TICK_S):
                hopeless = self._look_after_resident()
                if hopeless is not None:
                    status = hopeless
                    break
                if self._model:  # nodes without an engine would only take messages that they cannot answer
                    for node in self._nodes:
                        if node.ended() is not None:
                            node.schedule()
                        node.start_if_due()
                self._report()
        finally:
            self._shut_down()
        return status

    def _look_after_resident(self) -> int | None:
        """Ping it and restart it where needed; the exit status where that is no use."""
        status = self._resident.ended()
        if status is not None:
            self._watch.forget()
            self._state = "starting"
            if not self._model and status > 0:  # it gave up by itself before it was ever ready: no model, say
                return status
            self._resident.schedule()
        if self._resident.start_if_due() or self._resident.pid is None:
            return None
        pong = self._watch.look()
        if pong is not None:
            self._state, self._model, self._steps = "ready", self._watch.model, pong.steps
            if pong.stalled_s < FRESH_S:
                self._beat(Beat(time.time(), self._model, pong.waiting, pong.running))
        if self._watch.hung:
            log.error("the engine made no progress for %g s; killing it", self._settings.engine_timeout)
            self._resident.send(signal.SIGKILL)
        return None

    def _beat(self, beat: Beat) -> None:
        if self._heart is None:
            self._heart = Heart(self._settings.require_redis(), f"{platform.node()}:{os.getpid()}")
            self._heart.start()
        self._heart.told(beat)

    def _shut_down(self) -> None:
        """Nodes first, so that they can write what the engine has answered; then the engine."""
        self._state = "stopping"
        if self._heart is not None:
            self._heart.stop()
        for node in self._nodes:
            node.send(signal.SIGTERM)
        # Celery's warm shutdown: the children see the drain flag and hand back what they have not answered. What a
        # node that is killed leaves claimed, the sweep hands back.
        self._await_nodes(self._settings.shutdown_timeout)
        for node in self._nodes:
            node.send(signal.SIGKILL)
            node.wait(LAST_GRACE_S)
        self._watch.forget()
        self._resident.send(signal.SIGTERM)
        if not self._resident.wait(LAST_GRACE_S):
            self._resident.send(signal.SIGKILL)
            self._resident.wait(LAST_GRACE_S)

    def _await_nodes(self, timeout: float) -> None:
        give_up_at = time.monotonic() + timeout
        while sum(node.wait(0) for node in self._nodes) < len(self._nodes):
            if self._hurry or time.monotonic() >= give_up_at:
                return
            self._report()
            time.sleep(TICK_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._hurry = self._stop.is_set()  # asked twice
        self._stop.set()
        log.info("%s: stopping", signal.Signals(number).name)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = now
        current = report.Report(os.getpid(), self._state, str(self._socket), self._model, self._steps, time.time())
        with suppress(OSError):  # a full disk must not end a worker that could go on, nor its hand-back
            report.write(self._settings.home, current)


class _Watch:
    """Pings the resident: a process that answers no ping, or whose work stands still, is hung."""

    def __init__(self, socket: Path, timeout: float) -> None:
        self._socket = socket
        self._timeout = timeout
        self._link: Link | None = None
        self._pinged_at = 0.0
        self._awaited = False  # one ping at a time: a peer that reads nothing would fill the socket and block the next
        self._heard_at = 0.0
        self._stalled_s = 0.0

    @property
    def model(self) -> str:
        """What the resident answers with; empty while there is no connection."""
        return self._link.model if self._link else ""

    @property
    def hung(self) -> bool:
        """Whether it should be killed. A process that still loads is never hung: a model may be large."""
        silent_s = time.monotonic() - self._heard_at if self._link else 0.0
        return max(silent_s, self._stalled_s) > self._timeout

    def look(self) -> Pong | None:
        """Ping if it is time, and take what has come back; the newest pong, or None."""
        now = time.monotonic()
        try:
            if self._link is None:
                self._link = Link(self._socket, timeout=TICK_S)
                self._heard_at = now
            if not self._awaited and now - self._pinged_at >= PING_INTERVAL_S:
                self._pinged_at, self._awaited = now, True
                self._link.send(Ping())
            pongs = [frame for frame in self._link.read(0) if isinstance(frame, Pong)]
        except EngineLostError:
            self.forget()  # it loads, or it died, which its exit status will tell
            return None
        if not pongs:
            return None
        self._heard_at, self._stalled_s, self._awaited = now, pongs[-1].stalled_s, False
        return pongs[-1]

    def forget(self) -> None:
        """Hang up; the next look connects anew."""
        if self._link:
            self._link.close()
        self._link, self._stalled_s, self._awaited = None, 0.0, False
