"""A migrated database of the module's own, emptied before each test."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from ragspec.jobs.database import connect, upgrade


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
