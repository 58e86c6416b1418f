"""`ragspec tenants` and `ragspec keys`, on a real PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, delete

from ragspec.cli import cli
from ragspec.cli.tenants import LIMITS
from ragspec.errors import ConflictError, NotFoundError
from ragspec.jobs.keys import authenticate
from ragspec.jobs.tables import ApiKeyRow, TenantRow
from ragspec.jobs.tenant import DEFAULT_TENANT, Limits
from ragspec.jobs.tenants import find_tenant
from tests.integration.jobs.worlds import make_job

pytestmark = pytest.mark.services

Run = Callable[..., Result]


@pytest.fixture
def run(engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Run `ragspec ARGUMENTS` on a database with the default tenant alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAGSPEC_DATABASE_URL", database_url)
    yield lambda *arguments: CliRunner().invoke(cli, list(arguments))
    with engine.begin() as connection:
        connection.execute(delete(ApiKeyRow))
        connection.execute(delete(TenantRow).where(TenantRow.id != DEFAULT_TENANT))


def test_every_limit_has_its_option() -> None:
    assert list(LIMITS) == [field.name for field in fields(Limits)]


def test_a_tenant_is_made_limited_and_listed_with_what_it_has_under_way(run: Run, engine: Engine) -> None:
    made = run("tenants", "create", "acme", "--max-concurrent-jobs", "3", "--requests-per-minute", "none")
    limited = run("tenants", "limit", "acme", "--max-concurrent-jobs", "none", "--max-enqueued-questions", "0")
    make_job(engine, questions=4)

    acme = find_tenant(engine, "acme")
    assert made.stdout.strip() == str(acme.id)
    assert acme.limits == Limits(max_enqueued_questions=0)
    assert [line.split()[-1] for line in limited.stdout.splitlines()] == ["-", "0", "-"]
    table = [line.split() for line in run("tenants", "list").stdout.splitlines()]
    assert table == [
        ["name", "id", "requests/min", "questions", "jobs"],
        ["acme", str(acme.id), "-", "0/0", "0/-"],
        ["default", str(DEFAULT_TENANT), "-", "4/-", "1/-"],
    ]
    listed = json.loads(run("tenants", "list", "--json").stdout)
    assert listed[0] == {**acme.as_json(), "enqueued_questions": 0, "unfinished_jobs": 0}
    assert listed[1]["unfinished_jobs"] == 1


def test_a_key_is_shown_once_and_by_its_beginning_from_then_on(run: Run, engine: Engine) -> None:
    run("tenants", "create", "acme")
    made = run("keys", "create", "laptop", "--tenant", "acme")
    as_json = json.loads(run("keys", "create", "server", "--json").stdout)

    key = made.stdout.strip()
    assert authenticate(engine, key) == find_tenant(engine, "acme")
    assert authenticate(engine, as_json["key"]) == find_tenant(engine, "default")
    shown = run("keys", "list").stdout
    assert key[:10] + "..." in shown
    assert key not in shown + made.stderr
    assert as_json["key"] not in run("keys", "list", "--json").stdout
    assert [row["name"] for row in json.loads(run("keys", "list", "--tenant", "acme", "--json").stdout)] == ["laptop"]


def test_a_revoked_key_stays_in_the_list_and_lets_nobody_in(run: Run, engine: Engine) -> None:
    made = json.loads(run("keys", "create", "laptop", "--json").stdout)

    first = run("keys", "revoke", made["id"])
    again = json.loads(run("keys", "revoke", made["id"][:13], "--json").stdout)

    assert first.stdout == f"{made['id']} revoked\n"
    assert authenticate(engine, made["key"]) is None
    assert again["revoked_at"] is not None
    assert json.loads(run("keys", "list", "--json").stdout) == [again]


def test_with_no_key_the_list_says_so(run: Run) -> None:
    listed = run("keys", "list")

    assert (listed.stdout, listed.stderr) == ("", "no keys\n")
    assert run("keys", "list", "--json").stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["keys", "create", "laptop", "--tenant", "globex"], "unknown_tenant"),
        (["keys", "list", "--tenant", "globex"], "unknown_tenant"),
        (["tenants", "limit", "globex", "--max-concurrent-jobs", "1"], "unknown_tenant"),
        (["keys", "revoke", "abc"], "unknown_key"),
        (["keys", "create", "taken"], "key_exists"),
        (["tenants", "create", "default"], "tenant_exists"),
    ],
)
def test_what_is_not_there_or_there_already_is_named(run: Run, arguments: list[str], code: str) -> None:
    run("keys", "create", "taken")

    error: Any = run(*arguments).exception

    assert isinstance(error, NotFoundError | ConflictError)
    assert error.error_code == code


@pytest.mark.parametrize("value", ["-1", "1.5", "many", "2147483648", "²", ""])
def test_a_limit_is_a_whole_number_or_none(run: Run, value: str) -> None:
    refused = run("tenants", "create", "acme", "--max-concurrent-jobs", value)

    assert refused.exit_code == 2
    assert "neither a whole number" in refused.stderr
    assert run("tenants", "limit", "default").exit_code == 2
