"""Each embedded service by itself."""

from __future__ import annotations

import psycopg
import pytest
import redis

from ragspec.services.chroma import probe_chroma

pytestmark = pytest.mark.services


def test_redis_keeps_its_messages_on_disk_and_under_memory_pressure(redis_url: str) -> None:
    """The queue's Redis writes an append-only file and never evicts."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        kept = {**client.config_get("appendonly"), **client.config_get("maxmemory-policy")}

    assert kept == {"appendonly": "yes", "maxmemory-policy": "noeviction"}


def test_postgres_asks_for_the_password(postgres_url: str) -> None:
    """Being on this machine does not let one in."""
    with psycopg.connect(postgres_url) as connection:
        user = connection.execute("SELECT current_user").fetchone()
    stranger = postgres_url.replace("postgresql://ragspec:", "postgresql://ragspec:not-", 1)

    assert user == ("ragspec",)
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(stranger)


def test_chroma_answers(chroma_url: str) -> None:
    assert probe_chroma(chroma_url) is None
