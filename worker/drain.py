"""A node's wish to stop, as its tasks see it.

Celery tells only the node's parent process that a shutdown began; a child that is in the middle of a shard hears of it
here. The parent makes the flag before it forks and sets it when it shuts down; no signal is ever delivered to a child
that could cut a database commit (celery#10271).
"""

from __future__ import annotations

from typing import Any

from celery.signals import worker_init, worker_shutting_down

from worker.flag import Flag


class Drain(Flag):
    """Set when the node is to stop."""

    def begin(self) -> None:
        """Set it; safe in a signal handler."""
        self.set()

    def begun(self) -> bool:
        """Whether it is set."""
        return self.is_set()


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
