"""A node's wish to stop, as its pool children see it.

Celery tells only the node's parent process that a shutdown began; a child that is in the middle of a shard hears of it
here. The parent makes a pipe before it forks and writes one byte when it shuts down. Nobody reads that byte, so the
pipe stays readable in every child: `select` wakes at once, no lock is shared that a killed child could keep, and no
signal is ever delivered to a child that could cut a database commit (celery#10271).
"""

from __future__ import annotations

import os
import select
from typing import Any

from celery.signals import worker_init, worker_shutting_down


class Drain:
    """A flag that is set once, by the parent, and seen by every process forked after it was made."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        """Readable once the flag is set, for `select`."""
        return self._read

    def begin(self) -> None:
        """Set the flag; safe in a signal handler."""
        os.write(self._write, b"x")

    def begun(self) -> bool:
        """Whether the flag is set."""
        return bool(select.select([self._read], [], [], 0)[0])

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._read)
        os.close(self._write)


_current: list[Drain] = []


def node_drain() -> Drain:
    """This node's flag; made on the first call, which `worker_init` makes before the pool forks."""
    if not _current:
        _current.append(Drain())
    return _current[0]


@worker_init.connect  # type: ignore[untyped-decorator]  # celery ships no types
def _make(**_: Any) -> None:
    node_drain()


@worker_shutting_down.connect  # type: ignore[untyped-decorator]  # celery ships no types
def _begin(**_: Any) -> None:
    node_drain().begin()
