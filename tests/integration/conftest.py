"""A migrated database of the module's own, emptied before each test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from ragspec.jobs.database import connect, upgrade
from tests.integration.worker.yard import Yard


@pytest.fixture(scope="module")
def database_url(postgres_url: str) -> Iterator[str]:
    """A new, empty database; dropped afterwards."""
    server = connect(postgres_url)
    name = f"jobs_{uuid4().hex[:12]}"
    with server.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text(f"CREATE DATABASE {name}"))
    yield server.url.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    with server.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    server.dispose()


@pytest.fixture(scope="module")
def migrated(database_url: str) -> Iterator[Engine]:
    upgrade(database_url)
    engine = connect(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def engine(migrated: Engine) -> Engine:
    with migrated.begin() as connection:
        connection.execute(text("TRUNCATE jobs CASCADE"))
    return migrated


@pytest.fixture(scope="module")
def shared_yard(migrated: Engine, database_url: str, redis_url: str) -> Iterator[Yard]:
    """A yard of the module's own, for tests that leave it as they find it: a worker takes seconds to start."""
    with tempfile.TemporaryDirectory(prefix="yard-") as home:
        made = Yard(Path(home), migrated, database_url, redis_url)
        yield made
        made.close()


@pytest.fixture
def steady_yard(shared_yard: Yard) -> Iterator[Yard]:
    """The same, with an engine that is quick again after the test."""
    yield shared_yard
    shared_yard.behave()
