"""Real services for the tests: embedded ones, started once for the session by the starters of `ragspec up`.

RAGSPEC_TEST_REDIS_URL, RAGSPEC_TEST_DATABASE_URL and RAGSPEC_TEST_CHROMA_URL name servers to use in their place.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from ragspec.services.part import Part


@pytest.fixture(scope="session")
def services_home() -> Iterator[Path]:
    """A short-lived home, passable for the account that PostgreSQL runs under (pytest's own folders are not)."""
    home = Path(tempfile.mkdtemp(prefix="ragspec-test-"))
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_url(services_home: Path) -> Iterator[str]:
    """A Redis server, database 0."""
    if given := os.environ.get("RAGSPEC_TEST_REDIS_URL"):
        yield given
        return
    from ragspec.services.redis import redis_part

    with _serving(redis_part(services_home / "redis", services_home / "logs" / "redis.log")) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_url(services_home: Path) -> Iterator[str]:
    """A PostgreSQL server and a database in it, unmigrated; `CREATE DATABASE` is allowed."""
    if given := os.environ.get("RAGSPEC_TEST_DATABASE_URL"):
        yield given
        return
    from ragspec.services.postgres import postgres_part

    part = postgres_part(services_home / "postgres", services_home / "logs" / "postgres.log", durable=False)
    with _serving(part) as url:
        yield url


@pytest.fixture(scope="session")
def chroma_url(services_home: Path) -> Iterator[str]:
    """A Chroma server."""
    if given := os.environ.get("RAGSPEC_TEST_CHROMA_URL"):
        yield given
        return
    from ragspec.services.chroma import chroma_part

    with _serving(chroma_part(services_home / "chroma", services_home / "logs" / "chroma.log")) as url:
        yield url


@pytest.fixture(scope="module")
def database_url(postgres_url: str) -> Iterator[str]:
    """A migrated database of the test module's own."""
    import psycopg

    from ragspec.jobs.database import upgrade

    name = f"test_{uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute(f'CREATE DATABASE "{name}"')
        path, question_mark, query = postgres_url.partition("?")
        url = f"{path.rpartition('/')[0]}/{name}{question_mark}{query}"
        try:
            upgrade(url)
            yield url
        finally:
            server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextmanager
def _serving(part: Part) -> Iterator[str]:
    from ragspec.services.child import running

    with running([part]):
        yield part.url
