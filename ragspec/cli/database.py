"""The job database, for the verbs that need it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine

from ragspec.jobs.database import connect, reachable
from ragspec.settings import Settings


@contextmanager
def job_database(settings: Settings) -> Iterator[Engine]:
    """An engine that reports a server that is down or not migrated in our own words, and is disposed of.

    Raises:
        ServiceUnavailableError: see `ragspec.jobs.database.reachable`.
    """
    engine = connect(settings.require_database())
    try:
        with reachable(engine):
            yield engine
    finally:
        engine.dispose()
