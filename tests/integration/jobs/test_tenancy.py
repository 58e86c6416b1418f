"""Row-level security on a real PostgreSQL: a tenant sees and changes what is its own, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, delete, func, insert, select, text, update
from sqlalchemy.exc import ProgrammingError

from ragspec.errors import NotFoundError
from ragspec.jobs.answers import record_answers
from ragspec.jobs.cancel import cancel_job
from ragspec.jobs.claims import claim_shard
from ragspec.jobs.export import stream_answers, stream_skipped
from ragspec.jobs.intake import queued_shards, record_job
from ragspec.jobs.limits import Usage, usage
from ragspec.jobs.options import AnswerOptions
from ragspec.jobs.row import ParsedRow, RowFault
from ragspec.jobs.status import find_job, job_status, list_jobs
from ragspec.jobs.tables import AnswerRow, ApiKeyRow, Base, Job, QuestionRow, RowError, Shard, TenantRow, TokenSource
from ragspec.jobs.tenancy import as_tenant, engine_of
from ragspec.jobs.tenant import DEFAULT_TENANT
from ragspec.jobs.tenants import create_tenant
from ragspec.jobs.views import job_acceptance, token_acceptance
from tests.integration.jobs.worlds import MAX_ATTEMPTS, STALE_AFTER, claim, completed, failed

pytestmark = pytest.mark.services

OPTIONS = AnswerOptions(collection="handbook")
#: Everything that holds rows of a tenant, and how many it has of one `full_job`.
OWNED = {
    Job.__table__: 1,
    QuestionRow.__table__: 4,
    Shard.__table__: 2,
    AnswerRow.__table__: 3,
    RowError.__table__: 1,
    token_acceptance: 10,
    job_acceptance: 1,
}


@pytest.fixture
def tenants(engine: Engine) -> Iterator[tuple[UUID, UUID]]:
    """Two tenants beside the default one."""
    yield create_tenant(engine, "acme").id, create_tenant(engine, "globex").id
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE jobs CASCADE"))
        connection.execute(delete(TenantRow).where(TenantRow.id != DEFAULT_TENANT))


def full_job(engine: Engine, tenant_id: UUID) -> UUID:
    """A job of the tenant's with rows in every table: recorded as the tenant, answered as a worker does."""
    rows: list[ParsedRow | RowFault] = [ParsedRow(n, f"q{n}", f"question {n}?") for n in range(1, 5)]
    rows.append(RowFault(9, "empty_question", "Empty."))
    recorded = record_job(
        engine_of(engine, tenant_id),
        iter(rows),
        OPTIONS,
        source_name="q.jsonl",
        shard_size=2,
        skip_faults=True,
        tenant_id=tenant_id,
    )
    record_answers(engine, claim(engine, recorded.job_id), [completed(0), failed(1)])
    record_answers(engine, claim(engine, recorded.job_id, 1), [completed(2)])
    return recorded.job_id


def counted(connection: Any) -> dict[Any, int]:
    return {of: connection.execute(select(func.count()).select_from(of)).scalar_one() for of in OWNED}


def test_every_table_is_owned_or_known_to_hold_nothing_of_a_tenant() -> None:
    others = {TenantRow.__table__, ApiKeyRow.__table__, TokenSource.__table__}

    assert {of for of in OWNED if of.name in Base.metadata.tables} | others == set(Base.metadata.tables.values())


def test_a_tenant_sees_its_own_rows_in_every_table_and_view(engine: Engine, tenants: tuple[UUID, UUID]) -> None:
    for tenant_id in (*tenants, DEFAULT_TENANT):
        full_job(engine, tenant_id)

    for tenant_id in (*tenants, DEFAULT_TENANT):
        with as_tenant(engine, tenant_id) as connection:
            assert counted(connection) == OWNED
            assert list(connection.scalars(select(Job.tenant_id))) == [tenant_id]
            assert list(connection.scalars(select(TenantRow.id))) == [tenant_id]
    with engine.connect() as connection:
        assert counted(connection) == {of: 3 * n for of, n in OWNED.items()}


def test_with_no_tenant_set_nothing_is_seen(engine: Engine, tenants: tuple[UUID, UUID]) -> None:
    full_job(engine, tenants[0])
    full_job(engine, DEFAULT_TENANT)

    with engine.begin() as connection:
        connection.execute(text("SET LOCAL ROLE ragspec_tenant"))
        assert counted(connection) == dict.fromkeys(OWNED, 0)
        assert connection.execute(select(TenantRow.id)).all() == []
        # What a setting reads as that was set in an earlier transaction of the connection.
        connection.execute(text("SELECT set_config('ragspec.tenant', '', true)"))
        assert counted(connection) == dict.fromkeys(OWNED, 0)


def test_a_tenant_that_there_is_not_sees_and_records_nothing(engine: Engine, tenants: tuple[UUID, UUID]) -> None:
    full_job(engine, tenants[0])
    stranger = uuid4()

    with as_tenant(engine, stranger) as connection:
        assert counted(connection) == dict.fromkeys(OWNED, 0)
    with pytest.raises(Exception, match="tenant"):
        full_job(engine, stranger)


def test_the_role_and_the_tenant_end_with_the_transaction(engine: Engine, tenants: tuple[UUID, UUID]) -> None:
    pooled = engine.execution_options()
    full_job(engine, DEFAULT_TENANT)
    who = text("SELECT pg_backend_pid(), current_user, current_setting('ragspec.tenant', true)")

    with as_tenant(pooled, tenants[0]) as connection:
        inside = connection.execute(who).one()
        connection.execute(text("SAVEPOINT s"))
        connection.execute(text("ROLLBACK TO s"))
        assert connection.execute(who).one() == inside
    with pytest.raises(RuntimeError, match="broken"), as_tenant(pooled, tenants[0]):
        raise RuntimeError("broken")
    with pooled.connect() as connection:
        outside = connection.execute(who).one()
        assert counted(connection) == OWNED

    assert (inside[0], inside[1:]) == (outside[0], ("ragspec_tenant", str(tenants[0])))
    assert outside[1] != "ragspec_tenant"
    assert not outside[2]


def test_a_tenants_engine_is_the_tenants_in_every_transaction(engine: Engine, tenants: tuple[UUID, UUID]) -> None:
    with engine_of(engine, tenants[0]).connect() as connection:
        for _ in range(2):
            assert connection.execute(text("SELECT current_user")).scalar_one() == "ragspec_tenant"
            connection.commit()
    itself = engine_of(engine, tenants[0]).execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(RuntimeError, match="commits by itself"), itself.connect() as connection:
        connection.execute(text("SELECT 1"))


def test_the_verbs_of_a_job_work_as_its_tenant_and_know_no_other_job(
    engine: Engine, tenants: tuple[UUID, UUID]
) -> None:
    job_id = full_job(engine, tenants[0])
    own, other = (engine_of(engine, tenant_id) for tenant_id in tenants)

    assert [status.job_id for status in list_jobs(own)] == [job_id]
    assert list_jobs(other) == []
    assert find_job(own, "last") == job_id
    assert job_status(own, job_id).answered == 3
    assert len(list(stream_answers(own, job_id))) == 3
    assert list(stream_answers(other, job_id)) == list(stream_skipped(other, job_id)) == []
    assert len(list(stream_skipped(own, job_id))) == 1
    assert usage(own, tenants[0]) == usage(engine, tenants[0]) == Usage(1, 1)
    assert usage(other, tenants[0]) == Usage(0, 0)
    for verb in (job_status, cancel_job):
        with pytest.raises(NotFoundError):
            verb(other, job_id)
    with pytest.raises(NotFoundError):
        find_job(other, str(job_id))
    assert queued_shards(other, job_id) == []
    assert cancel_job(own, job_id) == "cancelling"


def test_two_tenants_same_rows_are_two_jobs_and_each_resumes_its_own(
    engine: Engine, tenants: tuple[UUID, UUID]
) -> None:
    first = [full_job(engine, tenant_id) for tenant_id in (*tenants, DEFAULT_TENANT)]
    assert len(set(first)) == 3

    for engine_, tenant_id, job_id in [
        (engine_of(engine, tenants[0]), tenants[0], first[0]),
        (engine, tenants[1], first[1]),
        (engine, DEFAULT_TENANT, first[2]),
    ]:
        rows: list[ParsedRow | RowFault] = [ParsedRow(n, f"q{n}", f"question {n}?") for n in range(1, 5)]
        again = record_job(engine_, iter(rows), OPTIONS, source_name="q", shard_size=2, tenant_id=tenant_id)
        assert (again.job_id, again.created) == (job_id, False)
        renewed = record_job(engine_, iter(rows), OPTIONS, source_name="q", shard_size=2, tenant_id=tenant_id, new=True)
        assert renewed.created
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).where(Job.resumable)).scalar_one() == 3


def job_row(tenant_id: UUID | None) -> dict[str, Any]:
    row = {
        "id": uuid4(),
        "state": "in_progress",
        "collection": "handbook",
        "source_name": "q",
        "fingerprint": uuid4().hex,
        "resumable": True,
        "options": {},
        "queue": "bulk",
        "questions_total": 1,
        "shard_size": 1,
    }
    return row if tenant_id is None else {**row, "tenant_id": tenant_id}


@pytest.mark.parametrize(
    ("refusal", "statement"),
    [
        ("row-level security", lambda theirs, them: insert(QuestionRow).values(job_id=theirs, idx=9, custom_id="x", text="?")),
        ("row-level security", lambda theirs, them: insert(Shard).values(job_id=theirs, shard_no=9, start_idx=9, end_idx=10)),
        ("row-level security", lambda theirs, them: insert(RowError).values(job_id=theirs, line=77, code="x", message="x")),
        ("row-level security", lambda theirs, them: insert(Job).values(job_row(them))),
        ("row-level security", lambda theirs, them: insert(Job).values(job_row(None))),
        ("permission denied", lambda theirs, them: update(Job).values(tenant_id=them)),
        ("permission denied", lambda theirs, them: update(Job).values(questions_total=1)),
        ("permission denied", lambda theirs, them: update(QuestionRow).values(text="other")),
        ("permission denied", lambda theirs, them: update(Shard).values(job_id=theirs)),
        ("permission denied", lambda theirs, them: update(AnswerRow).values(text="forged")),
        ("permission denied", lambda theirs, them: insert(AnswerRow).values(job_id=theirs, idx=3, attempt=1, status="failed")),
        ("permission denied", lambda theirs, them: delete(Job)),
        ("permission denied", lambda theirs, them: delete(AnswerRow)),
        ("permission denied", lambda theirs, them: update(TenantRow).values(max_concurrent_jobs=None)),
        ("row-level security", lambda theirs, them: update(TenantRow).values(id=them)),
        ("permission denied", lambda theirs, them: insert(TenantRow).values(id=uuid4(), name="mine")),
        ("permission denied", lambda theirs, them: select(ApiKeyRow.key_hash)),
        ("permission denied", lambda theirs, them: text("SELECT * FROM alembic_version")),
        ("permission denied", lambda theirs, them: text("TRUNCATE jobs CASCADE")),
        ("must be owner", lambda theirs, them: text("ALTER TABLE jobs DISABLE ROW LEVEL SECURITY")),
        ("must be owner", lambda theirs, them: text("DROP POLICY own ON jobs")),
        ("affected by row-level security", lambda theirs, them: text("SET LOCAL row_security = off; SELECT * FROM jobs")),
    ],
)  # fmt: skip
def test_what_a_tenant_may_not_write_or_read_is_refused(
    engine: Engine, tenants: tuple[UUID, UUID], refusal: str, statement: Any
) -> None:
    mine, theirs = (full_job(engine, tenant_id) for tenant_id in tenants)

    with pytest.raises(ProgrammingError, match=refusal), as_tenant(engine, tenants[0]) as connection:
        connection.execute(statement(theirs, tenants[1]))

    with engine.connect() as connection:
        assert dict(connection.execute(select(Job.id, Job.tenant_id)).all()) == {mine: tenants[0], theirs: tenants[1]}
        assert counted(connection) == {of: 2 * n for of, n in OWNED.items()}


def test_the_policies_hold_where_grants_do_not(engine: Engine, tenants: tuple[UUID, UUID]) -> None:
    """Were a grant too wide, no row of another tenant could be changed, deleted or taken all the same."""
    mine, theirs = (full_job(engine, tenant_id) for tenant_id in tenants)
    children = (QuestionRow, Shard, AnswerRow, RowError)
    with engine.connect() as connection:
        connection.execute(text("GRANT ALL ON ALL TABLES IN SCHEMA public TO ragspec_tenant"))
        become = text("SELECT set_config('role', 'ragspec_tenant', true), set_config('ragspec.tenant', :id, true)")
        connection.execute(become, {"id": str(tenants[0])})
        for statement in [
            update(Job).values(tenant_id=tenants[1]),
            *(update(child).values(job_id=theirs) for child in children),
            insert(AnswerRow).values(job_id=theirs, idx=3, attempt=1, status="failed", error_code="x"),
        ]:
            with pytest.raises(ProgrammingError, match="row-level security"), connection.begin_nested():
                connection.execute(statement)
        assert connection.execute(update(Job).values(error="mine")).rowcount == 1
        for child in (AnswerRow, Shard, RowError, QuestionRow, Job):
            of = child.id if child is Job else child.job_id
            assert connection.execute(delete(child).where(of == theirs)).rowcount == 0
        assert connection.execute(select(ApiKeyRow)).all() == []
        assert connection.execute(delete(Job)).rowcount == 1
        connection.rollback()

    with engine.connect() as connection:
        assert set(connection.scalars(select(Job.id))) == {mine, theirs}


def test_workers_and_other_roles_are_not_bound(engine: Engine, tenants: tuple[UUID, UUID]) -> None:
    job_id = full_job(engine, tenants[0])
    role = f"report_{uuid4().hex[:12]}"

    again = claim_shard(engine, job_id, 1, "w2", stale_after=STALE_AFTER, max_attempts=MAX_ATTEMPTS)
    assert again is None  # it is seen, and held
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
        connection.execute(text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"))
        connection.execute(text(f"SET LOCAL ROLE {role}"))
        assert counted(connection) == OWNED
        plan = connection.execute(text("EXPLAIN SELECT * FROM answers")).scalars().all()
        connection.rollback()
    assert not any("SubPlan" in line or "Filter" in line for line in plan)


@pytest.mark.parametrize("jobs", [10, 990])
def test_at_scale_a_tenant_reads_by_index_and_passes_over_nothing(
    engine: Engine, tenants: tuple[UUID, UUID], jobs: int
) -> None:
    """One tenant has ten of a thousand jobs, the other the rest."""
    tenant_id = tenants[0 if jobs == 10 else 1]
    with engine.begin() as connection:
        connection.execute(
            text(
                """
                INSERT INTO jobs (id, tenant_id, state, collection, source_name, fingerprint, resumable, options, queue,
                                  questions_total, shard_size, finished_at)
                SELECT gen_random_uuid(), CASE WHEN n % 100 = 0 THEN :mine ELSE :theirs END, 'completed', 'c', 's',
                       n::text, true, '{}', 'bulk', 40, 4, now() FROM generate_series(1, 1000) AS n
                """
            ).bindparams(mine=tenants[0], theirs=tenants[1])
        )
        for table, columns, values, parts in (
            ("questions", "idx, custom_id, text", "i, 'q' || i, 'question'", 40),
            ("answers", "idx, attempt, status", "i, 1, 'completed'", 40),
            ("row_errors", "line, code, message", "i, 'x', 'x'", 40),
            ("shards", "shard_no, start_idx, end_idx, state, completed", "i, i * 4, i * 4 + 4, 'done', 4", 10),
        ):
            of_jobs = f"SELECT id, {values} FROM jobs, generate_series(0, {parts - 1}) AS i"
            connection.execute(text(f"INSERT INTO {table} (job_id, {columns}) {of_jobs}"))
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("VACUUM ANALYZE"))
        job_id = connection.execute(select(Job.id).where(Job.tenant_id == tenant_id).limit(1)).scalar_one()

    own = engine_of(engine, tenant_id)
    seen = Statements(own)
    list(stream_answers(own, job_id))
    list(stream_skipped(own, job_id))
    job_status(own, job_id)
    usage(own, tenant_id)
    if jobs == 10:  # of 990, a table of so few pages is read whole, by its owner too
        list_jobs(own)
    queued_shards(own, job_id)
    with own.connect() as connection:
        for view in (token_acceptance, job_acceptance):
            connection.execute(select(view).where(view.c.job_id == job_id)).all()

    plans = seen.plans()
    assert len(plans) >= 8
    for statement, plan in plans:
        scans = [node for node in walk(plan) if node["Node Type"] == "Seq Scan"]
        assert {node["Relation Name"] for node in scans} <= {"tenants", "token_sources"}, statement
        read = [node for node in walk(plan) if node.get("Relation Name") not in {None, "token_sources"}]
        # A job's 40 questions, and the job looked at for each; or for the list 10 jobs' 10 shards each.
        assert all(
            node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) <= 100 for node in read
        ), statement


class Statements:
    """The statements that an engine runs, to be explained as it ran them."""

    def __init__(self, engine: Engine) -> None:
        from sqlalchemy import event

        self._engine = engine
        self._seen: list[tuple[str, Any]] = []
        event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if "set_config" not in statement:
            self._seen.append((statement, parameters))

    def plans(self) -> list[tuple[str, Any]]:
        seen, plans = list(self._seen), []
        for statement, parameters in seen:
            with self._engine.connect() as connection:
                explained = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}"
                (found,) = connection.exec_driver_sql(explained, parameters).scalar_one()
                plans.append((f"{statement}\n{json.dumps(found, indent=1)}", found["Plan"]))
        return plans


def walk(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from walk(child)
