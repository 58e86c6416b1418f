"""Recorders: what makes a function over fixed buffers into something that does the same again for less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

#: Does again what was recorded, on whatever its buffers hold by then.
Replay = Callable[[], None]


class Recorder(Protocol):
    """Records functions that read and write buffers which stay where they are, and of whose shapes none depends on data."""

    def record(self, run: Callable[[], None]) -> Replay:
        """Run a function as often as it takes to record it.

        Raises:
            Exception: whatever keeps it from being recorded.
        """
        ...

    def settle(self) -> None:
        """Wait until the device has done what replays asked of it.

        Raises:
            Exception: whatever went wrong there meanwhile.
        """
        ...


class PlainRecorder:
    """Records nothing: a replay is the function itself. With it the static step runs where there is no CUDA."""

    def record(self, run: Callable[[], None]) -> Replay:
        """See `Recorder.record`."""
        run()
        return run

    def settle(self) -> None:
        """See `Recorder.settle`; a replay is over when it returns."""
