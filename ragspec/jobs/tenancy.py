"""Acting as a tenant: transactions in which PostgreSQL shows and takes one tenant's rows and no others.

Each transaction takes the role `ragspec_tenant`, whom row-level policies bind, and names the tenant in the setting
`ragspec.tenant`; both end with it, so that a pooled connection never carries a tenant over. This guards against a query of
ours that forgets whose rows it may touch. It is no wall against foreign SQL: what runs inside may set another tenant, or
take the connection's own role again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from sqlalchemy import Connection, Engine, event

ROLE = "ragspec_tenant"
#: The execution option by which an engine acts as a tenant.
_TENANT = "ragspec_tenant"
#: `set_config('role', ..., true)` is SET LOCAL ROLE: one round trip for both.
_BECOME = f"SELECT set_config('role', '{ROLE}', true), set_config('ragspec.tenant', %s, true)"


def engine_of(engine: Engine, tenant_id: UUID) -> Engine:
    """An engine on the same pool whose every transaction is the tenant's; costs nothing to make.

    Whatever takes an engine takes this one: `status.list_jobs`, `intake.record_job`, `cancel.cancel_job`,
    `export.stream_answers`. What only workers and operators do (claims, answers, `retry_failed`) is refused by the
    database.
    """
    return engine.execution_options(**{_TENANT: str(tenant_id)})


@contextmanager
def as_tenant(engine: Engine, tenant_id: UUID) -> Iterator[Connection]:
    """A transaction in which everything happens as the tenant; committed at the end, rolled back on an error."""
    with engine_of(engine, tenant_id).begin() as connection:
        yield connection


@event.listens_for(Engine, "begin")
def _become_tenant(connection: Connection) -> None:
    tenant_id = connection.get_execution_options().get(_TENANT)
    if tenant_id is None:
        return
    if getattr(connection.connection.driver_connection, "autocommit", False):
        msg = "a connection that commits by itself has no transaction to be a tenant in"
        raise RuntimeError(msg)
    # A connection that streams its results would leave this one open.
    connection.exec_driver_sql(_BECOME, (tenant_id,), {"stream_results": False, "yield_per": None}).close()
