"""A running part. It never outlives the supervisor: the kernel signals it when the supervisor dies (Linux).

Start children from the main thread: the kernel ties a child to the thread that started it, not to the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from ragspec.errors import ServiceUnavailableError, SettingsError
from ragspec.services.part import Part

_PR_SET_PDEATHSIG = 1
#: Loaded here because nothing may be imported between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
#: A log that has grown beyond this many bytes is set aside when its part starts.
_LOG_LIMIT = 10_000_000
#: Seconds between two looks at a part that is starting or stopping.
_LOOK_EVERY = 0.05
#: Seconds after which a part that starts says what it is waiting for.
_REPORT_AFTER = 2.0


@dataclass(slots=True)
class Child:
    """A started part and its process."""

    part: Part
    process: subprocess.Popen[bytes]

    @property
    def running(self) -> bool:
        """Whether it runs. One that ended keeps its number until `stop` has seen to what it left behind."""
        if self.process.returncode is not None:
            return False
        return psutil.Process(self.process.pid).status() != psutil.STATUS_ZOMBIE

    def last_words(self, lines: int = 8) -> str:
        """The end of its log."""
        return tail(self.part.log, lines)

    def fate(self) -> str:
        """How it ended, in words; known once it was stopped."""
        code = self.process.returncode
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def start(part: Part) -> Child:
    """Start the process of `part`, in a session of its own so that Ctrl-C in the terminal reaches only us.

    Raises:
        ServiceUnavailableError: the program or the log cannot be opened.
    """
    account = part.account
    try:
        with _open_log(part.log) as log:
            process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=part.folder,
                env={**os.environ, **part.environment},
                start_new_session=True,
                user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=[] if account else None,
                preexec_fn=_tether(part.death_signal),  # noqa: PLW1509 - started from one thread, see above
            )
    except OSError as error:
        raise ServiceUnavailableError(
            f"{part.name} cannot be started: {error}.", f"Its log would be {part.log}."
        ) from None
    return Child(part, process)


def await_health(
    child: Child,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Wait until the part is well, or until `interrupted` says to stop waiting.

    Args:
        child: the part.
        interrupted: asked between two looks.
        report: told what the part is waiting for, when that takes long and whenever it changes.

    Raises:
        SettingsError: it ended because a setting of it is wrong; with the end of its log, as the next.
        ServiceUnavailableError: it ended, or is not well after its `start_timeout`.
    """
    part = child.part
    begun = time.monotonic()
    reported = ""
    while child.running and not interrupted():
        waiting_for = part.probe(child.process.pid)
        if waiting_for is None:
            return
        waited = time.monotonic() - begun
        if waited > part.start_timeout:
            msg = f"{part.name} is not well after {part.start_timeout:.0f} s: {waiting_for}."
            raise ServiceUnavailableError(msg, f"The end of {part.log}:\n{child.last_words()}", code="not_healthy")
        if waited > _REPORT_AFTER and waiting_for != reported:
            reported = waiting_for
            report(f"{part.name}: {waiting_for}")
        time.sleep(_LOOK_EVERY)
    if not child.running:
        stop(child)
        msg = f"{part.name} {child.fate()} while it started."
        advice = f"The end of {part.log}:\n{child.last_words()}"
        if child.process.returncode == SettingsError.exit_status:  # its last words name the setting
            raise SettingsError(msg, advice, code="not_started")
        raise ServiceUnavailableError(msg, advice, code="not_started")


def stop(child: Child, hurried: Callable[[], bool] = lambda: False) -> None:
    """Ask the part to finish and wait; kill its whole session when its time is over or when `hurried` says so."""
    if child.process.returncode is not None:
        return  # seen to before; its number may be another's by now
    pid = child.process.pid
    os.kill(pid, child.part.stop_signal)
    deadline = time.monotonic() + child.part.stop_timeout
    while child.running and time.monotonic() < deadline and not hurried():
        time.sleep(_LOOK_EVERY)
    # Also where it ended by itself: what it started and left behind is in its session still.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    child.process.wait()


@contextmanager
def running(parts: Sequence[Part]) -> Iterator[list[Child]]:
    """Run parts side by side, well once inside, stopped in reverse order on the way out."""
    children: list[Child] = []
    try:
        for part in parts:
            children.append(start(part))  # noqa: PERF401 - one that fails must leave the earlier ones to be stopped
        for child in children:
            await_health(child)
        yield children
    finally:
        for child in reversed(children):
            stop(child)


def tail(log: Path, lines: int) -> str:
    """The last lines of a log, or empty."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    return ""


def _open_log(log: Path) -> BinaryIO:
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_LIMIT:
            log.replace(log.with_name(log.name + ".1"))
    return log.open("ab")


def _tether(death_signal: signal.Signals) -> Callable[[], None]:
    parent = os.getpid()

    def tie() -> None:
        # Runs after the change of account, which would clear it.
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal))
            if os.getppid() != parent:  # the supervisor died before the line above
                os._exit(1)

    return tie
