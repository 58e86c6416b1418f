"""A yard of the test's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from ragspec.jobs.database import connect
from tests.integration.worker.yard import Yard


@pytest.fixture
def yard(database_url: str, redis_url: str) -> Iterator[Yard]:
    database = connect(database_url)
    with database.begin() as connection:
        connection.execute(text("TRUNCATE jobs CASCADE"))
    with tempfile.TemporaryDirectory(prefix="yard-") as home:
        made = Yard(Path(home), database, database_url, redis_url)
        yield made
        made.close()
    database.dispose()
