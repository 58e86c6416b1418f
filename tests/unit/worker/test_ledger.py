"""A claim's dealings with a PostgreSQL that fails now and then; the verbs of `ragspec.jobs` are stood in for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DataError, OperationalError

from ragspec.errors import ServiceUnavailableError
from ragspec.jobs import answers, claims
from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.claims import Claim
from worker.drain import Drain
from worker.ledger import Ledger

CLAIM = Claim(uuid4(), 0, 1, "here")
AWAY = OperationalError("SELECT 1", {}, ConnectionError("connection refused"))


@pytest.fixture
def drain() -> Iterator[Drain]:
    made = Drain()
    yield made
    made.close()


@pytest.fixture
def database() -> Engine:
    return create_engine("postgresql+psycopg://nowhere.invalid/nothing")


def failing(errors: list[Exception], then: Any) -> Callable[..., Any]:
    def act(*_: Any, **__: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return then

    return act


def test_a_server_that_comes_back_goes_unnoticed(
    monkeypatch: pytest.MonkeyPatch, database: Engine, drain: Drain
) -> None:
    monkeypatch.setattr(claims, "beat", failing([AWAY, AWAY], "ok"))

    assert Ledger(database, drain, patience=20).beat(CLAIM) == "ok"


def test_a_server_that_goes_away_between_two_batches_hides_no_question(
    monkeypatch: pytest.MonkeyPatch, database: Engine, drain: Drain
) -> None:
    errors: list[Exception] = []

    def unanswered(_: Engine, __: Claim, *, after_idx: int, batch: int) -> list[Question]:
        if errors:
            raise errors.pop(0)
        return [Question(idx, f"q{idx}", "?") for idx in range(after_idx + 1, 5)][:batch]

    monkeypatch.setattr(claims, "unanswered", unanswered)
    batches = Ledger(database, drain, patience=20).unanswered(CLAIM, 2)
    given = [*next(batches)]
    errors += [AWAY, AWAY]
    for batch in batches:
        given += batch

    assert [question.idx for question in given] == [0, 1, 2, 3, 4]


def test_a_server_that_stays_away_is_an_error(monkeypatch: pytest.MonkeyPatch, database: Engine, drain: Drain) -> None:
    monkeypatch.setattr(claims, "beat", failing([AWAY] * 99, "ok"))

    with pytest.raises(ServiceUnavailableError, match="PostgreSQL"):
        Ledger(database, drain, patience=0.05).beat(CLAIM)


def test_a_node_that_drains_waits_for_no_server(
    monkeypatch: pytest.MonkeyPatch, database: Engine, drain: Drain
) -> None:
    errors: list[Exception] = [AWAY] * 99
    monkeypatch.setattr(claims, "beat", failing(errors, "ok"))
    drain.begin()

    with pytest.raises(ServiceUnavailableError):
        Ledger(database, drain, patience=1000).beat(CLAIM)
    assert len(errors) == 98


def test_an_answer_that_cannot_be_stored_costs_only_its_own_row(
    monkeypatch: pytest.MonkeyPatch, database: Engine, drain: Drain
) -> None:
    stored: list[Answer] = []

    def record(_: Engine, __: Claim, ready: Sequence[Answer]) -> int:
        if any(answer.text == "bad" for answer in ready):
            raise DataError("INSERT", {}, ValueError("smallint out of range"))
        stored.extend(ready)
        return len(ready)

    monkeypatch.setattr(answers, "record_answers", record)
    ready = [Answer(idx, "completed", text=text) for idx, text in enumerate(["a", "bad", "c"])]

    assert Ledger(database, drain, patience=1).record(CLAIM, ready) == 3
    assert [(answer.idx, answer.status, answer.error_code) for answer in stored] == [
        (0, "completed", None),
        (1, "failed", "internal_error"),
        (2, "completed", None),
    ]
