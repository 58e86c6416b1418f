"""A process that the supervisor keeps alive."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

#: Pauses before a restart, seconds: doubled each time, from the first again once it lived for `HEALTHY_AFTER_S`.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
HEALTHY_AFTER_S = 60.0


class Child:
    """One command, run in a session of its own so that a terminal's Ctrl-C reaches only the supervisor."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        self._pause_s = FIRST_PAUSE_S

    @property
    def pid(self) -> int | None:
        """The running process, or None."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process; call it from the main thread, whose death ends it (see `worker.lifeline`)."""
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        self._started_at = time.monotonic()
        log.info("%s: started, pid %d", self.name, self._process.pid)

    def ended(self) -> int | None:
        """The exit status, once, if the process has ended since the last call."""
        status = self._process.poll() if self._process else None
        if status is None:
            return None
        self._process = None
        log.warning("%s: ended with status %d", self.name, status)
        return status

    def schedule(self) -> None:
        """Have a process that has ended started again by `start_if_due`, after a pause."""
        now = time.monotonic()
        if now - self._started_at > HEALTHY_AFTER_S:
            self._pause_s = FIRST_PAUSE_S
        self._start_at = now + self._pause_s
        log.warning("%s: again in %.1f s", self.name, self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def start_if_due(self) -> bool:
        """Start it again once its pause is over; True if this call did."""
        if self._process or time.monotonic() < self._start_at:
            return False
        self.start()
        return True

    def send(self, number: signal.Signals) -> None:
        """Signal the process, if it runs."""
        if self._process:
            self._process.send_signal(number)

    def wait(self, timeout: float) -> bool:
        """Wait for the end, at most so many seconds; True if it has ended."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._process = None
        return True
