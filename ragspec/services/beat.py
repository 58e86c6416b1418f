"""Celery beat, the clock that calls for the sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ragspec.interpreter import PYTHON
from ragspec.services.part import Part


def beat_part(log: Path, environment: Mapping[str, str]) -> Part:
    """Beat with its schedule in memory: it has only intervals, and a file would only be something to corrupt."""
    return Part(
        name="beat",
        command=(*PYTHON, "-m", "worker.command", "beat", "--scheduler", "celery.beat:Scheduler"),
        log=log,
        environment=environment,
        probe=lambda _pid: None,  # it answers nobody; that it runs is all there is to see
    )
