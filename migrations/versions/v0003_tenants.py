"""Tenants, their API keys and limits; jobs belong to a tenant, and the role `ragspec_tenant` sees one tenant's rows.

All jobs there are belong to the tenant `default`. Workers of revision 0002 run on. Producers of revision 0002 do not: the
index that resumes a job is a tenant's own now, and they name the one that was everybody's.

Two policies stand on each table. The permissive one lets everybody through whom grants let through, as before this revision;
the restrictive one binds `ragspec_tenant` alone. So roles of an administrator's own (a worker's, a report's) see what they saw.
"""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError

from ragspec.errors import RefusedError

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_DEFAULT = "00000000-0000-0000-0000-000000000001"
_ROLE = "ragspec_tenant"
_INSUFFICIENT_PRIVILEGE = "42501"

#: A role belongs to all databases of a cluster, and another one's migration may make it at this moment: hence no lock of
#: this database's, and hence what is caught. SET ROLE needs a membership, which the making of a role does not give (since
#: PostgreSQL 16) and which must not be inherited: its policies would bind the owner of another database's tables too.
_MAKE_ROLE = f"""
DO $$
DECLARE
    v16 boolean := current_setting('server_version_num')::int >= 160000;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{_ROLE}') THEN
        BEGIN
            CREATE ROLE {_ROLE} NOLOGIN;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
        END;
    END IF;
    IF NOT pg_has_role(current_user, '{_ROLE}', CASE WHEN v16 THEN 'SET' ELSE 'MEMBER' END) THEN
        BEGIN
            EXECUTE 'GRANT {_ROLE} TO CURRENT_USER' || CASE WHEN v16 THEN ' WITH INHERIT FALSE, SET TRUE' ELSE '' END;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
        END;
    END IF;
END
$$
"""
_SCHEMA = (
    f"DO $$ BEGIN EXECUTE '{{grant}} USAGE ON SCHEMA ' || quote_ident(current_schema()) || ' {{to}} {_ROLE}'; END $$"
)

#: Null where no tenant is set, and nothing equals that. Not in a sub-select, as is often advised: the planner computes this
#: beforehand and knows how few of the jobs are this tenant's.
_CURRENT = "nullif(current_setting('ragspec.tenant', true), '')::uuid"
#: What is seen of a job's parts is what is seen of the job: the policy on `jobs` applies inside this one. One look into an
#: index a row. Said by EXISTS, the planner may hash all of the tenant's jobs first, which takes reading them.
_OF_JOB = "(SELECT true FROM jobs WHERE jobs.id = {table}.job_id)"
_VISIBLE = {
    "tenants": f"id = {_CURRENT}",
    "api_keys": "false",
    "jobs": f"tenant_id = {_CURRENT}",
    **{table: _OF_JOB.format(table=table) for table in ("questions", "shards", "answers", "row_errors")},
}
#: What submitting, watching, cancelling and reading a job take. Who locks a row must hold UPDATE on one of its columns: of
#: `tenants (id)` the policy leaves only the update that changes nothing.
_GRANTS = (
    "SELECT, UPDATE (id) ON tenants",
    "SELECT, INSERT, UPDATE (state, resumable, cancel_requested_at, finished_at) ON jobs",
    "SELECT, INSERT ON questions",
    "SELECT, INSERT, UPDATE (enqueued_at) ON shards",
    "SELECT ON answers",
    "SELECT, INSERT ON row_errors",
    "SELECT ON token_sources",
    "SELECT ON token_acceptance",
    "SELECT ON job_acceptance",
)
_VIEWS = ("token_acceptance", "job_acceptance")
_UNFINISHED = "state IN ('in_progress', 'finalizing', 'cancelling')"


def upgrade() -> None:
    _make_role()
    tenants = _make_tables()
    op.bulk_insert(tenants, [{"id": UUID(_DEFAULT), "name": "default"}])
    op.add_column(
        "jobs", sa.Column("tenant_id", sa.Uuid(), server_default=sa.text(f"'{_DEFAULT}'::uuid"), nullable=False)
    )
    op.create_foreign_key(op.f("fk_jobs_tenant_id_tenants"), "jobs", "tenants", ["tenant_id"], ["id"])
    op.create_index("ix_jobs_tenant_id_created_at", "jobs", ["tenant_id", "created_at"])
    op.create_index("ix_jobs_unfinished_of_tenant", "jobs", ["tenant_id"], postgresql_where=sa.text(_UNFINISHED))
    op.drop_index("ix_jobs_fingerprint_resumable", table_name="jobs", postgresql_where=sa.text("resumable"))
    op.create_index(
        "ix_jobs_fingerprint_resumable",
        "jobs",
        ["tenant_id", "fingerprint"],
        unique=True,
        postgresql_where=sa.text("resumable"),
    )
    for view in _VIEWS:
        op.execute(f"ALTER VIEW {view} SET (security_invoker = true)")
    for table, visible in _VISIBLE.items():
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY granted ON {table} USING (true)")
        op.execute(f"CREATE POLICY own ON {table} AS RESTRICTIVE TO {_ROLE} USING ({visible})")
    op.execute(_SCHEMA.format(grant="GRANT", to="TO"))
    for grant in _GRANTS:
        op.execute(f"GRANT {grant} TO {_ROLE}")


def downgrade() -> None:
    """The role stays: other databases of the cluster may use it, and making it again is no error."""
    for grant in _GRANTS:
        op.execute(f"REVOKE ALL ON {grant.rpartition(' ')[2]} FROM {_ROLE}")
    op.execute(_SCHEMA.format(grant="REVOKE", to="FROM"))
    for table in _VISIBLE:
        op.execute(f"DROP POLICY own ON {table}")
        op.execute(f"DROP POLICY granted ON {table}")
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    for view in _VIEWS:
        op.execute(f"ALTER VIEW {view} RESET (security_invoker)")
    # Two tenants' same submissions are two jobs; before this revision one alone may be resumed.
    jobs = sa.table("jobs", sa.column("tenant_id", sa.Uuid()), sa.column("resumable", sa.Boolean()))
    op.execute(sa.update(jobs).where(jobs.c.tenant_id != sa.literal(UUID(_DEFAULT))).values(resumable=False))
    op.drop_index("ix_jobs_fingerprint_resumable", table_name="jobs", postgresql_where=sa.text("resumable"))
    op.create_index(
        "ix_jobs_fingerprint_resumable", "jobs", ["fingerprint"], unique=True, postgresql_where=sa.text("resumable")
    )
    op.drop_index("ix_jobs_unfinished_of_tenant", table_name="jobs", postgresql_where=sa.text(_UNFINISHED))
    op.drop_index("ix_jobs_tenant_id_created_at", table_name="jobs")
    op.drop_constraint(op.f("fk_jobs_tenant_id_tenants"), "jobs", type_="foreignkey")
    op.drop_column("jobs", "tenant_id")
    op.drop_table("api_keys")
    op.drop_table("tenants")


def _make_role() -> None:
    try:
        op.execute(_MAKE_ROLE)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _INSUFFICIENT_PRIVILEGE:
            raise
        raise RefusedError(
            f"The database's role may neither make the role {_ROLE}, which tenants need, nor give itself to it.",
            f"Let an administrator run `CREATE ROLE {_ROLE} NOLOGIN;` where there is none, and then `GRANT {_ROLE} TO "
            "USER;`, on PostgreSQL 16 or newer with `WITH INHERIT FALSE, SET TRUE`; USER is the one in "
            "RAGSPEC_DATABASE_URL. Then run `ragspec migrate` again.",
            code="role_missing",
        ) from None


def _make_tables() -> sa.Table:
    tenants = op.create_table(
        "tenants",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("max_enqueued_questions", sa.Integer(), nullable=True),
        sa.Column("max_concurrent_jobs", sa.Integer(), nullable=True),
        sa.CheckConstraint(
            "requests_per_minute >= 0 AND max_enqueued_questions >= 0 AND max_concurrent_jobs >= 0",
            name=op.f("ck_tenants_limits_positive"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("last_used_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("revoked_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("length(key_hash) = 32", name=op.f("ck_api_keys_hash_is_sha256")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
    )
    op.create_index(
        "ix_api_keys_name_in_use",
        "api_keys",
        ["tenant_id", "name"],
        unique=True,
        postgresql_where=sa.text("revoked_at IS NULL"),
    )
    return tenants
