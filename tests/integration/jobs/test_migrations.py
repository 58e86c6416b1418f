"""The schema's history, on a real PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from pytest_alembic.tests import (
    test_model_definitions_match_ddl,
    test_single_head_revision,
    test_up_down_consistency,
    test_upgrade,
)
from sqlalchemy import Engine, func, inspect, select, text

from ragspec.decoding.acceptance import Source
from ragspec.errors import ServiceUnavailableError, SettingsError
from ragspec.jobs.database import alembic_config as packaged_config
from ragspec.jobs.database import connect, reachable, upgrade
from ragspec.jobs.tables import Base, Job, TokenSource

pytestmark = pytest.mark.services

__all__ = [
    "test_model_definitions_match_ddl",
    "test_single_head_revision",
    "test_up_down_consistency",
    "test_upgrade",
]


@pytest.fixture
def alembic_config() -> Any:
    return packaged_config()


@pytest.fixture
def alembic_engine(database_url: str) -> Iterator[Engine]:
    """The module's database with nothing in it."""
    engine = connect(database_url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    yield engine
    engine.dispose()


def test_upgrade_makes_every_table_and_view_and_downgrade_takes_them_away(
    database_url: str, alembic_engine: Engine
) -> None:
    upgrade(database_url)
    made = inspect(alembic_engine)
    assert set(made.get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    assert set(made.get_view_names()) == {"token_acceptance", "job_acceptance"}

    config = packaged_config()
    config.attributes["connection"] = alembic_engine
    command.downgrade(config, "base")

    assert inspect(alembic_engine).get_table_names() == ["alembic_version"]
    assert inspect(alembic_engine).get_view_names() == []


def test_the_legend_of_token_sources_is_the_engines(database_url: str, alembic_engine: Engine) -> None:
    upgrade(database_url)

    with alembic_engine.connect() as connection:
        legend = dict(connection.execute(select(TokenSource.id, func.upper(TokenSource.name))).all())
    assert legend == {source.value: source.name for source in Source}


@pytest.mark.usefixtures("alembic_engine")
def test_two_processes_may_upgrade_at_once_from_any_folder(database_url: str, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom ragspec.jobs.database import upgrade\nupgrade(sys.argv[2])"
    )
    upgrading = [sys.executable, "-c", code, root, database_url]
    both = [subprocess.Popen(upgrading, cwd=tmp_path) for _ in range(2)]

    assert [process.wait() for process in both] == [0, 0]


def test_a_server_that_is_down_is_named_without_its_password() -> None:
    engine = connect("postgresql://someone:hunter2@127.0.0.1:1/jobs")

    wanted = r"PostgreSQL at 127\.0\.0\.1/jobs does not answer"
    with pytest.raises(ServiceUnavailableError, match=wanted) as caught, reachable(engine), engine.connect():
        pass

    assert "hunter2" not in str(caught.value)


@pytest.mark.usefixtures("alembic_engine")
def test_a_database_without_tables_asks_for_migrate(database_url: str) -> None:
    engine = connect(database_url)

    missing = pytest.raises(ServiceUnavailableError, match="ragspec migrate")
    with missing as caught, reachable(engine), engine.connect() as connection:
        connection.execute(select(Job.id))
    engine.dispose()

    assert caught.value.error_code == "schema_missing"


@pytest.mark.parametrize("url", ["mysql://host/db", "not a url", "http://host"])
def test_another_kind_of_url_is_a_wrong_setting(url: str) -> None:
    with pytest.raises(SettingsError, match="RAGSPEC_DATABASE_URL"):
        connect(url)
