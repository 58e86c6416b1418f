"""Tenants and their API keys, on a real PostgreSQL."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import Engine, delete, func, select, update

from ragspec.errors import ConflictError, InputError, NotFoundError
from ragspec.jobs.keys import authenticate, create_key, list_keys, revoke_key
from ragspec.jobs.tables import ApiKeyRow, TenantRow
from ragspec.jobs.tenant import DEFAULT_TENANT, Limits
from ragspec.jobs.tenants import create_tenant, find_tenant, limit_tenant, list_tenants

pytestmark = pytest.mark.services


@pytest.fixture(autouse=True)
def clean(engine: Engine) -> Iterator[None]:
    yield
    with engine.begin() as connection:
        connection.execute(delete(ApiKeyRow))
        connection.execute(delete(TenantRow).where(TenantRow.id != DEFAULT_TENANT))


def test_the_default_tenant_is_there_and_has_no_limits(engine: Engine) -> None:
    (default,) = list_tenants(engine)

    assert (default.id, default.name, default.limits) == (DEFAULT_TENANT, "default", Limits())


def test_a_tenant_is_made_found_listed_and_limited(engine: Engine) -> None:
    made = create_tenant(engine, "acme", Limits(requests_per_minute=60))

    assert find_tenant(engine, "acme") == made
    assert [tenant.name for tenant in list_tenants(engine)] == ["acme", "default"]
    changed = limit_tenant(engine, "acme", {"max_concurrent_jobs": 0})
    assert changed.limits == Limits(requests_per_minute=60, max_concurrent_jobs=0)
    assert limit_tenant(engine, "acme", {}) == changed


def test_what_cannot_be_a_tenant_is_said(engine: Engine) -> None:
    create_tenant(engine, "acme")

    with pytest.raises(ConflictError) as twice:
        create_tenant(engine, "acme")
    assert twice.value.error_code == "tenant_exists"
    for name in ("", "Acme", "-a", "a-", "a b", "a" * 64, "acme\n"):
        with pytest.raises(InputError) as bad:
            create_tenant(engine, name)
        assert bad.value.error_code == "bad_tenant_name"
    for look in (find_tenant, lambda engine, name: limit_tenant(engine, name, {"max_concurrent_jobs": 1})):
        with pytest.raises(NotFoundError) as unknown:
            look(engine, "globex")
        assert unknown.value.error_code == "unknown_tenant"


def test_a_key_lets_its_tenant_in_and_only_its_hash_is_kept(engine: Engine) -> None:
    acme = create_tenant(engine, "acme", Limits(requests_per_minute=60))
    kept, key = create_key(engine, "laptop", "acme")

    assert authenticate(engine, key) == acme
    assert len(key) == 4 + 43
    assert key.startswith(kept.prefix)
    with engine.connect() as connection:
        row = connection.execute(select(*ApiKeyRow.__table__.columns)).mappings().one()
    assert row["key_hash"] == hashlib.sha256(key.encode()).digest()
    assert key[len(kept.prefix) :] not in str(dict(row))
    assert list_keys(engine) == [list_keys(engine, "acme")[0]]
    assert list_keys(engine, "default") == []


def test_what_is_no_key_lets_nobody_in(engine: Engine) -> None:
    _, key = create_key(engine, "laptop")
    flipped = key[:-2] + ("A" if key[-2] != "A" else "B") + key[-1]

    assert authenticate(engine, key) == find_tenant(engine, "default")
    for other in (
        "",
        "rsk_",
        flipped,
        key[:-1],
        key + "A",
        key.upper(),
        key + "\n",
        "rsk_" + "\0" * 43,
        "rsk_" + "é" * 43,
    ):
        assert authenticate(engine, other) is None


def test_a_revoked_key_lets_nobody_in_and_may_be_revoked_again(engine: Engine) -> None:
    kept, key = create_key(engine, "laptop")
    other, other_key = create_key(engine, "server")

    revoked = revoke_key(engine, str(kept.id))
    again = revoke_key(engine, str(kept.id).upper()[:18])

    assert revoked.revoked_at is not None
    assert again == revoked
    assert authenticate(engine, key) is None
    assert authenticate(engine, other_key) is not None
    assert [key.revoked_at is None for key in list_keys(engine)] == [False, True]
    assert other.revoked_at is None


def test_a_name_is_one_keys_until_it_is_revoked(engine: Engine) -> None:
    create_tenant(engine, "acme")
    first, _ = create_key(engine, "laptop")
    create_key(engine, "laptop", "acme")

    with pytest.raises(ConflictError) as twice:
        create_key(engine, "laptop")
    assert twice.value.error_code == "key_exists"
    revoke_key(engine, str(first.id))
    create_key(engine, "laptop")


def test_errors_about_keys_have_codes(engine: Engine) -> None:
    with pytest.raises(NotFoundError) as unknown:
        create_key(engine, "laptop", "globex")
    assert unknown.value.error_code == "unknown_tenant"
    with pytest.raises(NotFoundError):
        list_keys(engine, "globex")
    for name in ("", "x" * 101, "a\nb", "a\0"):
        with pytest.raises(InputError) as bad:
            create_key(engine, name)
        assert bad.value.error_code == "bad_key_name"
    for text in ("", "ffff", "%", "nonsense", str(UUID(int=0))):
        with pytest.raises(NotFoundError) as missing:
            revoke_key(engine, text)
        assert missing.value.error_code == "unknown_key"
    for n in range(17):
        create_key(engine, f"key {n}")
    beginnings = [str(key.id)[0] for key in list_keys(engine)]
    shared = next(letter for letter in beginnings if beginnings.count(letter) > 1)
    with pytest.raises(InputError) as ambiguous:
        revoke_key(engine, shared)
    assert ambiguous.value.error_code == "ambiguous_key"


def test_the_last_use_is_noted_once_a_minute(engine: Engine) -> None:
    kept, key = create_key(engine, "laptop")
    assert list_keys(engine)[0].last_used_at is None

    authenticate(engine, key)
    first = list_keys(engine)[0].last_used_at
    authenticate(engine, key)
    assert first is not None
    assert list_keys(engine)[0].last_used_at == first

    with engine.begin() as connection:
        aged = func.clock_timestamp() - timedelta(seconds=61)
        connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == kept.id).values(last_used_at=aged))
    authenticate(engine, key)
    second = list_keys(engine)[0].last_used_at
    assert second is not None
    assert second > first - timedelta(seconds=1)
