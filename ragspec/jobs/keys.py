"""API keys: `rsk_` and 256 random bits, of which the database keeps only the SHA-256.

A password needs a slow hash with a salt because it can be guessed; a number of 256 random bits cannot, so a fast hash of it is
as good, and it can be looked up. The lookup goes by the hash: how long it takes may tell of the hash, which no one can
choose a key to match, and nothing of the key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine, Select, Text, cast, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from ragspec.errors import ConflictError, InputError, NotFoundError
from ragspec.jobs.tables import ApiKeyRow, TenantRow
from ragspec.jobs.tenant import Tenant
from ragspec.jobs.tenants import find_tenant, select_tenants, tenant_of

#: What a key begins with, so that a scanner for leaked secrets can know one.
MARK = "rsk_"
#: How often `last_used_at` is written at most.
USED_EVERY = timedelta(minutes=1)
_SHOWN = len(MARK) + 6
_KEY = re.compile(MARK + r"[A-Za-z0-9_-]{43}")
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key, without its hash.

    Attributes:
        id: names it in `revoke_key`.
        tenant: its tenant's name.
        name: for people; unique among the tenant's keys that are not revoked.
        prefix: how the key begins, to know it by.
        created_at: when.
        last_used_at: when it was last let in, to the minute.
        revoked_at: since when it is not let in.
    """

    id: UUID
    tenant: str
    name: str
    prefix: str
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None

    def as_json(self) -> dict[str, Any]:
        """As JSON values; timestamps are ISO 8601."""
        return {
            **{name: v.isoformat() if isinstance(v, datetime) else v for name, v in asdict(self).items()},
            "id": str(self.id),
        }


def create_key(engine: Engine, name: str, tenant: str = "default") -> tuple[ApiKey, str]:
    """Make a key for a tenant; returns what is kept of it, and the key itself, which cannot be had again.

    Raises:
        NotFoundError: there is no such tenant (`unknown_tenant`).
        InputError: the name is empty, longer than 100 characters or not printable (`bad_key_name`).
        ConflictError: the tenant has a key of this name in use (`key_exists`).
    """
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise InputError(
            f"{name!r} cannot be a key's name.", f"It has 1 to {_MAX_NAME} printable characters.", code="bad_key_name"
        )
    owner = find_tenant(engine, tenant)
    key = MARK + secrets.token_urlsafe(32)
    key_id, prefix = uuid4(), key[:_SHOWN]
    row = {"id": key_id, "tenant_id": owner.id, "name": name, "prefix": prefix, "key_hash": _hash(key)}
    try:
        with engine.begin() as connection:
            created_at = connection.execute(
                insert(ApiKeyRow).values(**row).returning(ApiKeyRow.created_at)
            ).scalar_one()
    except IntegrityError as error:
        if getattr(error.orig, "sqlstate", None) != "23505":
            raise
        raise ConflictError(
            f"Tenant {tenant!r} has a key {name!r} already.",
            "Choose another name, or revoke that one first.",
            code="key_exists",
        ) from None
    return ApiKey(key_id, owner.name, name, prefix, created_at, None, None), key


def list_keys(engine: Engine, tenant: str | None = None) -> list[ApiKey]:
    """All keys, or a tenant's, revoked ones too; by tenant, oldest first.

    Raises:
        NotFoundError: there is no such tenant (`unknown_tenant`).
    """
    query = _keys().order_by(TenantRow.name, ApiKeyRow.created_at)
    if tenant is not None:
        query = query.where(TenantRow.id == find_tenant(engine, tenant).id)
    with engine.connect() as connection:
        return [ApiKey(*row) for row in connection.execute(query)]


def revoke_key(engine: Engine, text: str) -> ApiKey:
    """Let a key in no more, from its next request on. Revoking it again changes nothing.

    Args:
        engine: the database.
        text: the key's id, or a beginning of it that only one key has.

    Raises:
        NotFoundError: no key is called so (`unknown_key`).
        InputError: several are (`ambiguous_key`).
    """
    text = text.strip().lower()
    found = []
    with engine.begin() as connection:
        if re.fullmatch(r"[0-9a-f][0-9a-f-]*", text):
            of_text = select(ApiKeyRow.id).where(cast(ApiKeyRow.id, Text).startswith(text)).limit(2)
            found = list(connection.scalars(of_text))
        if not found:
            raise NotFoundError(f"There is no key {text}.", "`ragspec keys list` lists them.", code="unknown_key")
        if len(found) > 1:
            raise InputError(f"Several keys begin with {text}.", "Write more of the id.", code="ambiguous_key")
        connection.execute(
            update(ApiKeyRow)
            .where(ApiKeyRow.id == found[0], ApiKeyRow.revoked_at.is_(None))
            .values(revoked_at=func.clock_timestamp())
        )
        return ApiKey(*connection.execute(_keys().where(ApiKeyRow.id == found[0])).one())


def authenticate(engine: Engine, key: str) -> Tenant | None:
    """The tenant whose key this is; None where it is nobody's, or revoked. `engine` is not a tenant's own.

    One query; once a minute and key, its `last_used_at` is written too.
    """
    if not _KEY.fullmatch(key):
        return None
    presented = _hash(key)
    unnoted = or_(ApiKeyRow.last_used_at.is_(None), ApiKeyRow.last_used_at < func.clock_timestamp() - USED_EVERY)
    query = (
        select_tenants()
        .add_columns(ApiKeyRow.id, ApiKeyRow.key_hash, unnoted)
        .join(ApiKeyRow, ApiKeyRow.tenant_id == TenantRow.id)
        .where(ApiKeyRow.key_hash == presented, ApiKeyRow.revoked_at.is_(None))
    )
    with engine.begin() as connection:
        row = connection.execute(query).one_or_none()
        if row is None:
            return None
        *of_tenant, key_id, kept, due = row
        if not hmac.compare_digest(kept, presented):  # the index found equal bytes; nothing rests on its collation
            return None
        if due:  # asked again inside: of many requests at once, one writes
            connection.execute(
                update(ApiKeyRow).where(ApiKeyRow.id == key_id, unnoted).values(last_used_at=func.clock_timestamp())
            )
    return tenant_of(of_tenant)


def _keys() -> Select[*tuple[Any, ...]]:
    return select(
        ApiKeyRow.id,
        TenantRow.name,
        ApiKeyRow.name,
        ApiKeyRow.prefix,
        ApiKeyRow.created_at,
        ApiKeyRow.last_used_at,
        ApiKeyRow.revoked_at,
    ).join(TenantRow, TenantRow.id == ApiKeyRow.tenant_id)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
