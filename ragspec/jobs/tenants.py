"""Making, finding and limiting tenants. None is ever deleted: its jobs and collections would be nobody's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any
from uuid import uuid4

from sqlalchemy import Engine, Select, insert, select, update
from sqlalchemy.exc import IntegrityError

from ragspec.errors import ConflictError, InputError, NotFoundError
from ragspec.jobs.tables import TenantRow
from ragspec.jobs.tenant import Limits, Tenant

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LIMITS = tuple(field.name for field in fields(Limits))
_COLUMNS = (TenantRow.id, TenantRow.name, TenantRow.created_at, *(getattr(TenantRow, name) for name in _LIMITS))


def create_tenant(engine: Engine, name: str, limits: Limits | None = None) -> Tenant:
    """Make a tenant.

    Raises:
        InputError: the name breaks the rule (`bad_tenant_name`).
        ConflictError: there is one of this name (`tenant_exists`).
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} cannot be a tenant's name.",
            "It has 1 to 63 characters from a-z, 0-9 and '-', and starts and ends with a letter or digit.",
            code="bad_tenant_name",
        )
    values = {limit: getattr(limits, limit) for limit in _LIMITS} if limits else {}
    try:
        with engine.begin() as connection:
            row = connection.execute(insert(TenantRow).values(id=uuid4(), name=name, **values).returning(*_COLUMNS))
            return tenant_of(row.one())
    except IntegrityError as error:
        if getattr(error.orig, "sqlstate", None) != "23505":
            raise
        raise ConflictError(f"There is a tenant {name!r} already.", code="tenant_exists") from None


def find_tenant(engine: Engine, name: str) -> Tenant:
    """The tenant of this name.

    Raises:
        NotFoundError: there is none (`unknown_tenant`).
    """
    with engine.connect() as connection:
        row = connection.execute(select_tenants().where(TenantRow.name == name)).one_or_none()
    if row is None:
        raise _unknown(name)
    return tenant_of(row)


def list_tenants(engine: Engine) -> list[Tenant]:
    """All tenants, by name."""
    with engine.connect() as connection:
        return [tenant_of(row) for row in connection.execute(select_tenants().order_by(TenantRow.name))]


def limit_tenant(engine: Engine, name: str, changes: Mapping[str, int | None]) -> Tenant:
    """Change limits of a tenant, from its next submission on; what is under way goes on.

    Args:
        engine: the database.
        name: the tenant's.
        changes: fields of `Limits` and their new values, at least 0, or None for no limit; the others stay.

    Raises:
        NotFoundError: there is none of this name (`unknown_tenant`).
    """
    values = {limit: changes[limit] for limit in _LIMITS if limit in changes}
    if values:
        with engine.begin() as connection:
            connection.execute(update(TenantRow).where(TenantRow.name == name).values(**values))
    return find_tenant(engine, name)


def select_tenants() -> Select[*tuple[Any, ...]]:
    """A query of tenants whose rows `tenant_of` reads."""
    return select(*_COLUMNS)


def tenant_of(row: Sequence[Any]) -> Tenant:
    """The tenant that a row of `select_tenants` holds."""
    return Tenant(row[0], row[1], row[2], Limits(*row[3:]))


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"There is no tenant {name!r}.", "`ragspec tenants list` lists them.", code="unknown_tenant")
