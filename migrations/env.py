"""Where Alembic finds the tables and the database.

The connection comes from `config.attributes["connection"]` (a program, a test) or else from RAGSPEC_DATABASE_URL.
Everything runs in one transaction behind an advisory lock: several processes that start together upgrade once, and a
migration that fails leaves nothing behind.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, Engine, text

from ragspec.jobs.database import connect, reachable
from ragspec.jobs.tables import Base
from ragspec.settings import load_settings

#: Any number that nothing else in the database locks: "ragspec" read as base 36, cut to 31 bits.
_MIGRATION_LOCK = int("ragspec", 36) % 2**31


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        context.run_migrations()


def _offline() -> None:
    context.configure(dialect_name="postgresql", target_metadata=Base.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def _online() -> None:
    given = context.config.attributes.get("connection")
    if isinstance(given, Connection):
        _migrate(given)
        return
    engine = given if isinstance(given, Engine) else connect(load_settings().require_database())
    with reachable(engine), engine.connect() as connection:
        _migrate(connection)


if context.is_offline_mode():
    _offline()
else:
    _online()
