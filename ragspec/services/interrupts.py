"""Requests to stop, noted when they come and acted on when it is safe."""

from __future__ import annotations

import select
import signal
import socket
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is entered; a signal the caller ignores (nohup) stays ignored."""

    def __init__(self) -> None:
        self.requests = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _REQUESTS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        # A child's end wakes the wait as well; it is looked at there.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    @property
    def stopping(self) -> bool:
        """Whether someone asked to stop."""
        return self.requests > 0

    @property
    def hurried(self) -> bool:
        """Whether someone asked twice."""
        return self.requests > 1

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, `seconds` at most."""
        select.select([self._reader], [], [], seconds)
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.requests += 1
