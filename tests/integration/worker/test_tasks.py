"""What a task does with a claim that it cannot see through, on a real PostgreSQL."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine

from ragspec.jobs.message import ShardMessage
from ragspec.settings import Settings, settings
from tests.integration.jobs.worlds import claim, make_job, shard_row
from worker.drain import Drain
from worker.ledger import Ledger

pytestmark = pytest.mark.services


@pytest.fixture
def tasks(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, which wants Redis when it is imported."""
    monkeypatch.setenv("RAGSPEC_REDIS_URL", redis_url)
    settings.cache_clear()
    yield importlib.import_module("worker.tasks")
    settings.cache_clear()


def test_a_run_that_fails_as_nobody_foresaw_gives_the_shard_back_and_has_used_a_try(
    engine: Engine, tasks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = make_job(engine)
    message = ShardMessage(job_id, 0, "bulk", 2)

    def fail(_: object) -> None:
        assert shard_row(engine, job_id).state == "running"
        raise RuntimeError("of all things")

    monkeypatch.setattr(tasks.ShardRun, "run", fail)
    drain, link = Drain(), Any
    try:
        with pytest.raises(RuntimeError, match="of all things"):
            tasks._answer(message, link, Ledger(engine, drain, patience=1.0), Settings(), drain)
    finally:
        drain.close()

    row = shard_row(engine, job_id)
    assert (row.state, row.tries, row.enqueued_at) == ("queued", 1, None), "the next sweep sends it"
    claim(engine, job_id)
