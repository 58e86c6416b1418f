"""`ragspec up --detach` and `ragspec down`."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ragspec.errors import ServiceUnavailableError
from ragspec.interpreter import PYTHON
from ragspec.services.home import log_of, prepare_home, speaking_of
from ragspec.services.record import end, forget_record, is_held, read_record
from ragspec.services.worker import forget_dead_workers
from ragspec.settings import SERVICES_FILE

_LOOK_EVERY = 0.1


def start_detached(home: Path, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Run `ragspec up` with `arguments` in a session of its own; return once everything is well.

    Args:
        home: RAGSPEC_HOME.
        arguments: further arguments of `ragspec up`.
        say: prints a line; gets what `up` prints meanwhile.

    Returns:
        0 if it runs, else the exit status of `up`, whose error has been said.
    """
    prepare_home(home)
    log = log_of(home, "up")
    with speaking_of(home), log.open("ab") as written, log.open("rb") as read:
        read.seek(0, 2)
        up = subprocess.Popen(
            (*PYTHON, "-m", "ragspec", "up", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

        def relay() -> None:
            for line in read.read().decode(errors="replace").splitlines():
                say(line)

        try:
            while up.poll() is None:
                record = read_record(home)
                relay()
                if record and record.supervisor.pid == up.pid and record.state == "ready":
                    say(f"It runs in the background now, process {up.pid}.")
                    up.returncode = 0  # left on purpose; Popen would warn of a child that it still waits for
                    return 0
                time.sleep(_LOOK_EVERY)
        except KeyboardInterrupt:
            up.terminate()
            up.wait()
            relay()
            return up.returncode or 128 + signal.SIGINT
        relay()
        # It ended before everything was well, by an error of its own or by a `ragspec down` from elsewhere.
        return up.returncode or ServiceUnavailableError.exit_status


def stop_detached(home: Path, say: Callable[[str], None], patience: float = 120.0) -> None:
    """Stop the `ragspec up` of this home and wait until all of it is gone.

    Raises:
        ServiceUnavailableError: it was not gone after `patience` seconds and had to be killed.
    """
    record = read_record(home)
    supervisor = record.supervisor.find() if record and is_held(home) else None
    if record is None or supervisor is None:
        leftovers = end(record.children) if record else []
        for leftover in leftovers:
            say(f"{leftover.name}: ended process {leftover.pid}, left behind by a `ragspec up` that was killed")
        with suppress(OSError):
            (home / SERVICES_FILE).unlink(missing_ok=True)
            forget_record(home)
            forget_dead_workers(home)
        if not leftovers:
            say(f"Nothing runs in {home}.")
        return
    if record.state != "stopping":  # asked again, it would not wait for its children
        with suppress(psutil.NoSuchProcess):
            supervisor.terminate()
    # Not psutil's wait: where nobody collects the dead (a container without init), it would wait for a zombie.
    deadline = time.monotonic() + patience
    while record.supervisor.find() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
    gone = record.supervisor.find() is None
    if not gone:
        supervisor.kill()
    leftovers = end(record.children)
    if not gone or leftovers:
        names = ", ".join(leftover.name for leftover in leftovers) or "`ragspec up`"
        raise ServiceUnavailableError(
            f"Not everything in {home} stopped by itself within {patience:.0f} s; killed: {names}.",
            f"See {home / 'logs'}; data is safe, unanswered questions are taken up again.",
            code="killed",
        )
    say(f"Stopped everything in {home}.")
