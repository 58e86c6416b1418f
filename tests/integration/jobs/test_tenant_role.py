"""The role `ragspec_tenant`, on a PostgreSQL of this module's own: a role is all databases', and others have made it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from alembic import command
from sqlalchemy import Engine, func, insert, inspect, select, text
from sqlalchemy.engine import make_url

from ragspec.errors import RefusedError
from ragspec.jobs.database import alembic_config, connect, upgrade
from ragspec.jobs.tables import Job
from ragspec.jobs.tenancy import as_tenant
from ragspec.jobs.tenant import DEFAULT_TENANT
from ragspec.jobs.tenants import create_tenant, list_tenants
from ragspec.services.child import running
from ragspec.services.postgres import postgres_part

pytestmark = pytest.mark.services

ROLE = "SELECT count(*) FROM pg_roles WHERE rolname = 'ragspec_tenant'"


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    home = Path(tempfile.mkdtemp(prefix="ragspec-test-"))
    part = postgres_part(home / "postgres", home / "postgres.log", durable=False)
    with running([part]):
        yield part.url
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def server(server_url: str) -> Iterator[psycopg.Connection]:
    """The administrator's connection; what a test makes with it is gone afterwards."""
    made = "SELECT datname FROM pg_database WHERE datname LIKE 'role_test%'"
    roles = "SELECT rolname FROM pg_roles WHERE rolname LIKE 'migrator%' OR rolname = 'ragspec_tenant'"
    with psycopg.connect(server_url, autocommit=True) as connection:
        yield connection
        for (name,) in connection.execute(made).fetchall():
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        for (name,) in connection.execute(roles).fetchall():
            connection.execute(f"DROP ROLE {name}")


def database(server: psycopg.Connection, server_url: str, rights: str | None = None) -> str:
    """The URL of a new database, owned by a new role with these rights, or by the administrator."""
    name = f"role_test_{uuid4().hex[:12]}"
    url = make_url(server_url).set(database=name)
    if rights is None:
        server.execute(f"CREATE DATABASE {name}")
    else:
        owner = f"migrator_{uuid4().hex[:12]}"
        server.execute(f"CREATE ROLE {owner} LOGIN PASSWORD 'secret' {rights}")
        server.execute(f"CREATE DATABASE {name} OWNER {owner}")
        url = url.set(username=owner, password="secret")
    return url.render_as_string(hide_password=False)


def tables(url: str) -> list[str]:
    engine = connect(url)
    names = inspect(engine).get_table_names()
    engine.dispose()
    return names


def test_a_role_that_may_make_no_roles_is_told_what_an_administrator_has_to_run(
    server: psycopg.Connection, server_url: str
) -> None:
    url = database(server, server_url, "NOCREATEROLE")
    owner = make_url(url).username

    for first in (True, False):
        with pytest.raises(RefusedError, match="CREATE ROLE ragspec_tenant NOLOGIN;") as caught:
            upgrade(url)
        assert caught.value.error_code == "role_missing"
        assert tables(url) == []
        if first:
            server.execute("CREATE ROLE ragspec_tenant NOLOGIN")
    server.execute(f"GRANT ragspec_tenant TO {owner} WITH INHERIT FALSE, SET TRUE")
    upgrade(url)

    assert_tenants_work(url)


@pytest.mark.parametrize("rights", [None, "CREATEROLE"])
def test_a_role_that_may_make_roles_makes_it_and_takes_it(
    server: psycopg.Connection, server_url: str, rights: str | None
) -> None:
    url = database(server, server_url, rights)

    upgrade(url)

    assert server.execute(ROLE).fetchone() == (1,)
    login, inherits = server.execute(
        "SELECT r.rolcanlogin, coalesce(bool_or(m.inherit_option), false) FROM pg_roles r "
        "LEFT JOIN pg_auth_members m ON m.roleid = r.oid WHERE r.rolname = 'ragspec_tenant' GROUP BY r.rolcanlogin"
    ).fetchone() or (None, None)
    assert (login, inherits) == (False, False)
    assert_tenants_work(url)


def test_databases_of_a_cluster_share_it_and_may_make_it_at_once(server: psycopg.Connection, server_url: str) -> None:
    urls = [database(server, server_url) for _ in range(4)]
    code = "import sys\nfrom ragspec.jobs.database import upgrade\nupgrade(sys.argv[1])"

    racing = [subprocess.Popen([sys.executable, "-c", code, url]) for url in urls]

    assert [process.wait() for process in racing] == [0] * 4
    assert server.execute(ROLE).fetchone() == (1,)
    engine = connect(urls[0])
    config = alembic_config()
    config.attributes["connection"] = engine
    command.downgrade(config, "base")
    engine.dispose()
    assert_tenants_work(urls[1])
    upgrade(urls[0])
    assert_tenants_work(urls[0])


def test_two_migrations_at_the_same_statement_make_it_once(server: psycopg.Connection, server_url: str) -> None:
    """The second waits for the first, which has made the role and not committed."""
    url = database(server, server_url)
    with psycopg.connect(server_url) as other:
        other.execute("CREATE ROLE ragspec_tenant NOLOGIN")
        code = "import sys\nfrom ragspec.jobs.database import upgrade\nupgrade(sys.argv[1])"
        second = subprocess.Popen([sys.executable, "-c", code, url])
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while (server.execute(waiting).fetchone() or (0,))[0] == 0:
            assert second.poll() is None
        other.commit()

    assert second.wait() == 0
    assert_tenants_work(url)


def test_jobs_become_the_default_tenants_and_stay_when_tenants_go(server: psycopg.Connection, server_url: str) -> None:
    url = database(server, server_url)
    upgrade(url, "0002")
    engine = connect(url)
    row = (
        "INSERT INTO jobs (id, state, collection, source_name, fingerprint, resumable, options, queue, questions_total, "
        "shard_size) VALUES (:id, 'in_progress', 'c', 's', 'f', true, '{}', 'bulk', 1, 1)"
    )
    old, new = uuid4(), uuid4()
    with engine.begin() as connection:
        connection.execute(text(row), {"id": old})

    upgrade(url)
    acme = create_tenant(engine, "acme")
    with as_tenant(engine, acme.id) as connection:
        connection.execute(insert(Job).values(_copy(acme.id, new)))
    with engine.connect() as connection:
        assert dict(connection.execute(select(Job.id, Job.tenant_id)).all()) == {old: DEFAULT_TENANT, new: acme.id}
    config = alembic_config()
    config.attributes["connection"] = engine
    command.downgrade(config, "0002")

    with engine.connect() as connection:
        kept = dict(connection.execute(text("SELECT id, resumable FROM jobs")).all())
        assert kept == {old: True, new: False}
        assert connection.execute(text("SELECT count(*) FROM pg_policies")).scalar_one() == 0
        granted = "SELECT count(*) FROM information_schema.role_table_grants WHERE grantee = 'ragspec_tenant'"
        assert connection.execute(text(granted)).scalar_one() == 0
        columns = "SELECT count(*) FROM information_schema.column_privileges WHERE grantee = 'ragspec_tenant'"
        assert connection.execute(text(columns)).scalar_one() == 0
        acl = connection.execute(text("SELECT nspacl::text FROM pg_namespace WHERE nspname = 'public'")).scalar_one()
        assert "ragspec_tenant" not in acl
    engine.dispose()


def _copy(tenant_id: UUID, job_id: UUID) -> dict[str, object]:
    names = {"collection": "c", "source_name": "s", "fingerprint": "f", "queue": "bulk", "state": "in_progress"}
    return {
        **names,
        "id": job_id,
        "tenant_id": tenant_id,
        "resumable": True,
        "options": {},
        "questions_total": 1,
        "shard_size": 1,
    }


def assert_tenants_work(url: str) -> None:
    engine = connect(url)
    try:
        acme = create_tenant(engine, f"acme-{uuid4().hex[:6]}")
        with as_tenant(engine, acme.id) as connection:
            connection.execute(insert(Job).values(_copy(acme.id, uuid4())))
            assert list(connection.scalars(select(Job.tenant_id))) == [acme.id]
        with as_tenant(engine, DEFAULT_TENANT) as connection:
            assert connection.execute(select(func.count()).select_from(Job)).scalar_one() == 0
        assert DEFAULT_TENANT in {tenant.id for tenant in list_tenants(engine)}
        _count_all(engine)
    finally:
        engine.dispose()


def _count_all(engine: Engine) -> None:
    """The owner, no superuser perhaps, sees every tenant's."""
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(Job)).scalar_one() >= 1
