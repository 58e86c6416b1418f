"""A yard of the test's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.integration.worker.yard import Yard


@pytest.fixture
def yard(engine: Engine, database_url: str, redis_url: str) -> Iterator[Yard]:
    with tempfile.TemporaryDirectory(prefix="yard-") as home:
        made = Yard(Path(home), engine, database_url, redis_url)
        yield made
        made.close()
