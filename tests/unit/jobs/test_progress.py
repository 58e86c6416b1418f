"""Watching a job through a restart of the database."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from ragspec.cli import progress
from ragspec.errors import ServiceUnavailableError


@dataclass
class Finished:
    finished: bool = True


ENGINE = create_engine("postgresql+psycopg://nowhere/none")


def test_a_database_that_comes_back_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def status(*_: object) -> Finished:
        asked.append(1)
        if len(asked) < 4:
            raise OperationalError("select", {}, Exception("the server restarts"))
        return Finished()

    monkeypatch.setattr(progress, "job_status", status)
    monkeypatch.setattr(progress, "_POLL_S", 0.0)

    assert [one.finished for one in progress._polled(ENGINE, uuid4())] == [True]
    assert len(asked) == 4


def test_one_that_stays_away_says_that_the_job_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(*_: object) -> Finished:
        raise OperationalError("select", {}, Exception("gone"))

    monkeypatch.setattr(progress, "job_status", status)
    monkeypatch.setattr(progress, "_POLL_S", 0.0)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)

    with pytest.raises(ServiceUnavailableError, match="is recorded and goes on"):
        list(progress._polled(ENGINE, uuid4()))
