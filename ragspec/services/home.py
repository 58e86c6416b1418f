"""RAGSPEC_HOME: the folder that holds everything of the embedded services. What lies where:

`redis/`, `postgres/`, `chroma/`: data; `models/`: the model cache; `logs/`: one log a part; `run/`: what runs now.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragspec.errors import ServiceUnavailableError

#: Free bytes below which nothing is started: a fresh cluster and its log take 60 MB, a converted model 300 MB.
LEAST_FREE_BYTES = 512_000_000
#: What the folder of an engine's socket is called first, among the temporary ones.
SOCKET_FOLDER = "ragspec-"


def run_folder(home: Path) -> Path:
    """What runs now."""
    return home / "run"


def worker_report(home: Path, pid: int | str) -> Path:
    """Where the worker with this process id says how it fares.

    Containers that share a home count their processes from 1 each, hence the host's name.
    """
    return run_folder(home) / f"worker-{platform.node()}-{pid}.json"


def worker_reports(home: Path) -> Iterator[tuple[int, Path]]:
    """This machine's workers, by process id, and their reports; in a shared home, those of `gpu-2` are not `gpu`'s."""
    reports = worker_report(home, "*")
    for report in reports.parent.glob(reports.name):
        pid = report.stem.rpartition("-")[2]
        if pid.isdecimal() and report == worker_report(home, pid):
            yield int(pid), report


def log_of(home: Path, part: str) -> Path:
    """The log of a part."""
    return home / "logs" / f"{part}.log"


def prepare_home(home: Path) -> None:
    """Make the home where it lacks, and see that it can be written to and has room.

    Raises:
        ServiceUnavailableError: it cannot (code `home_unusable`), or has not (code `disk_full`).
    """
    with speaking_of(home):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (run_folder(home), home / "logs"):
            folder.mkdir(mode=0o700, exist_ok=True)
        probe = run_folder(home) / f"probe-{os.getpid()}"
        probe.write_bytes(bytes(4096))
        probe.unlink()
    free = shutil.disk_usage(home).free
    if free < LEAST_FREE_BYTES:
        raise _disk_full(home, f"{free // 1_000_000} MB are free, {LEAST_FREE_BYTES // 1_000_000} MB are needed")


@contextmanager
def speaking_of(home: Path) -> Iterator[None]:
    """Turn what the file system refuses within into words about the home."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise _disk_full(home, error.strerror or "no space left") from None
        if error.filename is None:
            raise
        raise ServiceUnavailableError(
            f"RAGSPEC_HOME={home} cannot be used: {error.strerror}: {error.filename}.",
            "Set RAGSPEC_HOME to a folder that you may write to.",
            code="home_unusable",
        ) from None


def _disk_full(home: Path, how: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"The disk that holds RAGSPEC_HOME={home} is full: {how}.",
        "Free some space, or set RAGSPEC_HOME to a folder on another disk.",
        code="disk_full",
    )
