"""The way to PostgreSQL: engines, errors a person can act on, and the schema's migrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import make_conninfo
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, ProgrammingError

from ragspec.errors import ServiceUnavailableError, SettingsError

if TYPE_CHECKING:
    from alembic.config import Config

#: Seconds until a server that does not answer counts as down.
CONNECT_TIMEOUT_S = 5
_UNDEFINED_TABLE, _UNDEFINED_COLUMN = "42P01", "42703"


def connect(url: str) -> Engine:
    """An engine for `postgres://`, `postgresql://` or `postgresql+psycopg://`; nothing is contacted yet.

    Connections are tested before use, so that a restarted server costs a reconnect and not an error. An engine must
    not cross a fork: call `engine.dispose(close=False)` in the child.

    Raises:
        SettingsError: the URL is no PostgreSQL URL, or has a parameter that there is not.
    """
    return create_engine(
        psycopg_url(url),
        pool_pre_ping=True,
        connect_args={"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "ragspec"},
    )


@contextmanager
def reachable(engine: Engine) -> Iterator[None]:
    """Turn what the driver says of a server that is down or not migrated into an error a person can act on.

    Raises:
        ServiceUnavailableError: the server does not answer (`service_unavailable`), or its schema is missing or
            older than this program (`schema_missing`).
    """
    where = f"{engine.url.host or engine.url.query.get('host', 'localhost')}/{engine.url.database}"
    try:
        yield
    except (OperationalError, psycopg.OperationalError) as error:
        reason = str(getattr(error, "orig", error)).strip().splitlines()[0].rstrip(".")
        raise ServiceUnavailableError(
            f"PostgreSQL at {where} does not answer: {reason}.",
            "Start it with `ragspec up`, or check RAGSPEC_DATABASE_URL.",
        ) from error
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) not in {_UNDEFINED_TABLE, _UNDEFINED_COLUMN}:
            raise
        raise ServiceUnavailableError(
            f"The database {where} lacks tables that this version needs.",
            "Run `ragspec migrate`.",
            code="schema_missing",
        ) from error
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
        raise ServiceUnavailableError(
            f"PostgreSQL at {where} went away: {str(error.orig).strip()}.", "Try again when it is back."
        ) from error


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the schema up to `revision`; safe when several processes do so at once.

    Raises:
        ServiceUnavailableError: the server does not answer.
    """
    from alembic import command

    engine = connect(url)
    try:
        with reachable(engine), engine.connect() as connection:
            config = alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
    finally:
        engine.dispose()


def alembic_config() -> Config:
    """Alembic's configuration for the packaged migrations, whatever the working directory."""
    from alembic.config import Config

    import migrations

    config = Config()
    # ConfigParser reads `%` as an interpolation.
    config.set_main_option("script_location", str(Path(migrations.__path__[0])).replace("%", "%%"))
    return config


def psycopg_url(url: str) -> URL:
    """RAGSPEC_DATABASE_URL as SQLAlchemy takes it; raises as `connect` does."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # a port that is no number, brackets that do not close
        parsed = None
    if parsed is None or parsed.drivername not in {"postgres", "postgresql", "postgresql+psycopg"}:
        raise SettingsError(
            "RAGSPEC_DATABASE_URL is not a PostgreSQL URL.", "Write postgresql://user:password@host/database."
        )
    address = parsed.set(drivername="postgresql+psycopg")
    try:
        make_conninfo(**address.get_dialect()().create_connect_args(address)[1])
    except psycopg.ProgrammingError as error:  # libpq names the parameter that it does not know, and nothing else
        raise SettingsError(
            f"RAGSPEC_DATABASE_URL cannot be used: {' '.join(str(error).split())}.",
            "What may stand behind its `?` are libpq's connection parameters, such as sslmode.",
        ) from None
    except (ArgumentError, ValueError):  # SQLAlchemy quotes what it cannot read
        raise SettingsError(
            "RAGSPEC_DATABASE_URL cannot be used: the hosts and ports behind its `?` do not fit together.",
            "Write several as ?host=a:5432&host=b:5432.",
        ) from None
    return address
