"""What a tenant may have under way, on a real PostgreSQL; two submissions at once too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import UUID

import pytest
from sqlalchemy import Engine, delete, func, select, text, update

from ragspec.jobs.answers import record_answers
from ragspec.jobs.cancel import cancel_job
from ragspec.jobs.claims import finish_shard
from ragspec.jobs.intake import Recorded, record_job
from ragspec.jobs.limits import LimitReachedError, Usage, usage
from ragspec.jobs.options import AnswerOptions
from ragspec.jobs.row import ParsedRow, RowFault
from ragspec.jobs.tables import Job, QuestionRow, TenantRow
from ragspec.jobs.tenancy import engine_of
from ragspec.jobs.tenant import DEFAULT_TENANT, Limits
from ragspec.jobs.tenants import create_tenant, limit_tenant
from tests.integration.jobs.worlds import claim, completed, failed

pytestmark = pytest.mark.services

OPTIONS = AnswerOptions(collection="handbook")


@pytest.fixture
def tenant_id(engine: Engine) -> Iterator[UUID]:
    yield create_tenant(engine, "acme", Limits(max_enqueued_questions=10, max_concurrent_jobs=3)).id
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE jobs CASCADE"))
        connection.execute(delete(TenantRow).where(TenantRow.id != DEFAULT_TENANT))


@pytest.fixture(params=["as the tenant", "as the owner"])
def submit(request: pytest.FixtureRequest, engine: Engine, tenant_id: UUID) -> Callable[..., Recorded]:
    """Submit so many questions of a name for the tenant."""
    used = engine_of(engine, tenant_id) if request.param == "as the tenant" else engine

    def submit(questions: int, name: str = "q", *, new: bool = False) -> Recorded:
        rows: list[ParsedRow | RowFault] = [ParsedRow(n + 1, f"{name}{n}", "Who?") for n in range(questions)]
        return record_job(used, iter(rows), OPTIONS, source_name=name, shard_size=4, new=new, tenant_id=tenant_id)

    return submit


def test_questions_beyond_the_limit_are_refused_and_leave_nothing(
    engine: Engine, tenant_id: UUID, submit: Callable[..., Recorded]
) -> None:
    submit(7)

    with pytest.raises(LimitReachedError, match="max_enqueued_questions is 10, of which 3 remain") as caught:
        submit(4, "other")

    refused = caught.value
    assert (refused.error_code, refused.exit_status) == ("limit_reached", 73)
    assert (refused.limit, refused.allowed, refused.remaining, refused.asked) == ("max_enqueued_questions", 10, 3, 4)
    assert usage(engine, tenant_id) == Usage(7, 1)
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(QuestionRow)).scalar_one() == 7
    submit(3, "other")
    assert usage(engine, tenant_id) == Usage(10, 2)


def test_jobs_beyond_the_limit_are_refused_until_one_is_over(
    engine: Engine, tenant_id: UUID, submit: Callable[..., Recorded]
) -> None:
    first, _, _ = (submit(1, name) for name in "abc")

    with pytest.raises(LimitReachedError, match="max_concurrent_jobs is 3, of which 0 remain"):
        submit(1, "d")
    cancel_job(engine, first.job_id)

    assert submit(1, "d").created


def test_answered_questions_make_room(engine: Engine, tenant_id: UUID, submit: Callable[..., Recorded]) -> None:
    job_id = submit(10).job_id
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(0), failed(1)])
    assert usage(engine, tenant_id) == Usage(8, 1)

    with pytest.raises(LimitReachedError, match="2 remain"):
        submit(3, "other")
    record_answers(engine, held, [completed(2), completed(3)])
    finish_shard(engine, held)

    assert submit(3, "other").created
    assert usage(engine, tenant_id) == Usage(9, 2)


def test_resuming_takes_no_room_and_answering_again_does(submit: Callable[..., Recorded]) -> None:
    first = submit(10)

    assert submit(10).job_id == first.job_id
    with pytest.raises(LimitReachedError):
        submit(10, new=True)
    # What the refused one had undone is done again.
    assert submit(10).job_id == first.job_id


def test_of_submissions_at_once_no_more_pass_than_there_is_room_for(
    engine: Engine, tenant_id: UUID, submit: Callable[..., Recorded]
) -> None:
    start = Barrier(6)

    def race(n: int) -> bool:
        start.wait()
        try:
            return submit(4, f"file{n}-").created
        except LimitReachedError:
            return False

    with ThreadPoolExecutor(6) as pool:
        passed = list(pool.map(race, range(6)))

    assert sum(passed) == 2
    assert usage(engine, tenant_id) == Usage(8, 2)


def test_the_second_submission_waits_for_the_first_and_counts_it(
    engine: Engine, tenant_id: UUID, submit: Callable[..., Recorded]
) -> None:
    """Held at its end, the first has not committed when the second comes to its count."""
    with ThreadPoolExecutor(1) as pool, engine.connect() as first:
        first.execute(select(TenantRow.id).where(TenantRow.id == tenant_id).with_for_update(key_share=True))
        second = pool.submit(submit, 4)
        waiting = select(func.count()).select_from(text("pg_stat_activity")).where(text("wait_event_type = 'Lock'"))
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
            while not watching.execute(waiting).scalar_one():
                assert not second.done()
        first.execute(update(TenantRow).where(TenantRow.id == tenant_id).values(max_concurrent_jobs=0))
        first.commit()
        with pytest.raises(LimitReachedError, match="max_concurrent_jobs is 0"):
            second.result()


def test_without_limits_no_row_is_locked_and_other_tenants_are_not_counted(engine: Engine, tenant_id: UUID) -> None:
    rows: list[ParsedRow | RowFault] = [ParsedRow(n + 1, f"q{n}", "Who?") for n in range(50)]
    with engine.connect() as first:
        first.execute(select(TenantRow.id).where(TenantRow.id == DEFAULT_TENANT).with_for_update(key_share=True))
        assert record_job(engine, iter(rows), OPTIONS, source_name="q", shard_size=4).created

    assert usage(engine, DEFAULT_TENANT) == Usage(50, 1)
    assert usage(engine, tenant_id) == Usage(0, 0)


def test_a_limit_may_be_lifted_and_may_stand_below_what_is_under_way(
    engine: Engine, tenant_id: UUID, submit: Callable[..., Recorded]
) -> None:
    submit(10)
    limit_tenant(engine, "acme", {"max_enqueued_questions": 5})
    with pytest.raises(LimitReachedError, match="is 5, of which 0 remain"):
        submit(1, "other")

    changed = limit_tenant(engine, "acme", {"max_enqueued_questions": None})

    assert changed.limits == Limits(max_concurrent_jobs=3)
    assert submit(1000, "other").created
    with engine.connect() as connection:
        assert set(connection.scalars(select(Job.tenant_id))) == {tenant_id}
