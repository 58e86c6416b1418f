"""The record of a running `ragspec up`, and the lock that makes it the only one of its home.

The lock is the kernel's, so it ends with its holder however that ends; the record only says who holds it. A process is
named by id and time of birth, so that a number given out again is never taken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from ragspec.errors import ConflictError
from ragspec.services.home import run_folder
from ragspec.services.secret import write_secret

State = Literal["starting", "ready", "stopping"]
#: Seconds by which two readings of one process's birth may differ: the kernel counts from a boot time that a
#: correction of the clock moves.
_SAME_BIRTH = 2.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, for good.

    Attributes:
        name: what people call it.
        pid: its number while it lives.
        born: its start, in seconds since the epoch.
    """

    name: str
    pid: int
    born: float

    @classmethod
    def of(cls, name: str, pid: int) -> ProcessId | None:
        """The process that has `pid` now; None if there is none."""
        with suppress(psutil.NoSuchProcess):
            return cls(name, pid, psutil.Process(pid).create_time())
        return None

    def find(self) -> psutil.Process | None:
        """The process if it lives still."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if _lives(process) and abs(process.create_time() - self.born) < _SAME_BIRTH:
                return process
        return None


@dataclass(frozen=True, slots=True)
class Record:
    """A running `ragspec up`: its process, how far it is, its children."""

    supervisor: ProcessId
    state: State
    children: tuple[ProcessId, ...]

    def write(self, home: Path) -> None:
        """Put the record in its place, whole."""
        write_secret(_record_file(home), json.dumps(asdict(self), indent=1))


def read_record(home: Path) -> Record | None:
    """The record of the latest `ragspec up` that has not taken it away; None if there is none that can be read."""
    try:
        found = json.loads(_record_file(home).read_text())
        children = tuple(ProcessId(**child) for child in found["children"])
        return Record(ProcessId(**found["supervisor"]), found["state"], children)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_record(home: Path) -> None:
    """Take the record away."""
    _record_file(home).unlink(missing_ok=True)


@contextmanager
def hold_home(home: Path) -> Iterator[None]:
    """Be the only `ragspec up` of this home.

    Raises:
        ConflictError: another one runs (code `already_running`); names its process.
    """
    with (run_folder(home) / "up.lock").open("a") as lock:
        if not _acquire(lock.fileno()):
            record = read_record(home)
            who = f" (process {record.supervisor.pid}, {record.state})" if record else ""
            raise ConflictError(
                f"`ragspec up` runs already in {home}{who}.",
                "Use it as it is, stop it with `ragspec down`, or set RAGSPEC_HOME to another folder.",
                code="already_running",
            )
        yield


def is_held(home: Path) -> bool:
    """Whether a `ragspec up` runs in this home."""
    try:
        with (run_folder(home) / "up.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two who look do not see each other
    except BlockingIOError:
        return True
    except OSError:  # no such home: nothing runs in it
        return False
    return False


def end(processes: Sequence[ProcessId], patience: float = 10.0) -> list[ProcessId]:
    """End processes, what they started, and what shares their sessions; returns those that lived still.

    Asks with SIGTERM first, kills after `patience` seconds.
    """
    lived = [process for process in processes if process.find()]
    doomed: dict[int, psutil.Process] = {}
    sessions = {process.pid for process in lived}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.pid != os.getpid() and os.getsid(process.pid) in sessions:
                doomed[process.pid] = process
    for leader in lived:
        if found := leader.find():
            with suppress(psutil.NoSuchProcess):
                doomed.update({child.pid: child for child in (found, *found.children(recursive=True))})
    for process in doomed.values():
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in _living(doomed.values(), patience):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _living(doomed.values(), patience)
    return lived


def _living(processes: Iterable[psutil.Process], patience: float) -> list[psutil.Process]:
    """Those that live after at most `patience` seconds.

    Not psutil's wait: where nobody collects the dead (a container without init), it would wait for a zombie.
    """
    deadline = time.monotonic() + patience
    while (living := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return living


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _acquire(descriptor: int) -> bool:
    # A few tries: `is_held` of another process holds the lock for an instant.
    for _ in range(5):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)
    return False


def _record_file(home: Path) -> Path:
    return run_folder(home) / "up.json"
