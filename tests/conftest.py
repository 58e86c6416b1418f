"""Real services for the tests (provisional: addresses come from the environment)."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def postgres_url() -> str:
    """A PostgreSQL server, a database of the session's own."""
    return os.environ["RAGSPEC_TEST_DATABASE_URL"]


@pytest.fixture(scope="session")
def redis_url() -> str:
    return os.environ["RAGSPEC_TEST_REDIS_URL"]


@pytest.fixture(scope="session")
def chroma_url() -> str:
    return os.environ["RAGSPEC_TEST_CHROMA_URL"]
