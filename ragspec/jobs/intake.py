"""Recording a job: rows stream into a temporary table, and one transaction makes questions and shards of them.

Neither this process nor the transaction holds the file in memory: duplicates are found and the rows are numbered by
the database. Whatever goes wrong, either the whole job is recorded or nothing is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
from psycopg.types.json import Jsonb
from sqlalchemy import Connection, Engine, and_, func, select, text, update
from sqlalchemy.dialects.postgresql import insert

from ragspec.errors import InputError
from ragspec.jobs.fence import lock_job
from ragspec.jobs.limits import require_room
from ragspec.jobs.message import ShardMessage
from ragspec.jobs.options import AnswerOptions
from ragspec.jobs.row import ParsedRow, RowFault
from ragspec.jobs.tables import Job, Shard
from ragspec.jobs.tenant import DEFAULT_TENANT

#: Bad rows that are reported one by one; of the rest only the number is.
SHOWN_FAULTS = 20

_INCOMING = """
CREATE TEMPORARY TABLE incoming (
    line bigint NOT NULL, custom_id text, text text, row_options jsonb, code text, message text, advice text
) ON COMMIT DROP
"""
_COPY = "COPY incoming (line, custom_id, text, row_options, code, message, advice) FROM STDIN"
_MARK_DUPLICATES = """
UPDATE incoming SET code = 'duplicate_custom_id', advice = 'Give each row an id of its own.',
       message = 'custom_id ' || quote_literal(incoming.custom_id) || ' was taken by line ' || first.line || '.'
FROM (SELECT custom_id, min(line) AS line FROM incoming WHERE code IS NULL GROUP BY custom_id HAVING count(*) > 1)
     AS first
WHERE incoming.custom_id = first.custom_id AND incoming.code IS NULL AND incoming.line > first.line
"""
_FAULTS = "SELECT line, code, message, advice, custom_id FROM incoming WHERE code IS NOT NULL ORDER BY line LIMIT :n"
_INSERT_QUESTIONS = """
INSERT INTO questions (job_id, idx, custom_id, text, row_options)
SELECT :job_id, row_number() OVER (ORDER BY line) - 1, custom_id, text, row_options FROM incoming WHERE code IS NULL
"""
_INSERT_FAULTS = """
INSERT INTO row_errors (job_id, line, custom_id, code, message, advice)
SELECT :job_id, line, custom_id, code, message, advice FROM incoming WHERE code IS NOT NULL
"""
_INSERT_SHARDS = """
INSERT INTO shards (job_id, shard_no, start_idx, end_idx, enqueued_at)
SELECT :job_id, n, n * :size, least((n + 1) * :size, :total), clock_timestamp()
FROM generate_series(0, (:total - 1) / :size) AS n
"""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A job that is in the database.

    Attributes:
        job_id: its id.
        created: False where an earlier submission of the same rows and options is resumed.
        questions: how many it has.
        row_errors: how many rows were skipped.
        faults: the first of them.
    """

    job_id: UUID
    created: bool
    questions: int
    row_errors: int
    faults: tuple[RowFault, ...] = ()


class RowsRejectedError(InputError):
    """Rows that cannot be asked, in a file of which every row must be; nothing was recorded.

    Args:
        faults: the first of them, at least one.
        total: how many there are.
        advice: what to do.
    """

    code = "bad_rows"

    def __init__(self, faults: tuple[RowFault, ...], total: int, advice: str) -> None:
        shown = "".join(f"\n  {fault}" for fault in faults)
        more = f"\n  and {total - len(faults)} more" if total > len(faults) else ""
        rows = "1 row" if total == 1 else f"{total} rows"
        # One kind of fault gives its own code, so that a script can tell a duplicate from a broken line.
        kinds = {fault.code for fault in faults}
        code = kinds.pop() if len(kinds) == 1 and total == len(faults) else None
        super().__init__(f"{rows} cannot be asked; nothing was recorded.{shown}{more}\n", advice, code=code)
        self.faults = faults
        self.total = total


def record_job(
    engine: Engine,
    rows: Iterable[ParsedRow | RowFault],
    options: AnswerOptions,
    *,
    source_name: str,
    shard_size: int,
    skip_faults: bool = False,
    new: bool = False,
    tenant_id: UUID = DEFAULT_TENANT,
) -> Recorded:
    """Record a job of these rows, or find the one that the same rows and options of the same tenant already made.

    Two callers that record the same rows at once make one job: the unique index on the fingerprint lets one insert
    win and the other resume.

    Args:
        engine: the database.
        rows: the file's rows, read once.
        options: the job's.
        source_name: the file, for people and for `ragspec evaluate`.
        shard_size: questions per message.
        skip_faults: record bad rows in `row_errors` and go on; otherwise one bad row rejects the file.
        new: make a new job even if there is one to resume; the older one is left as it is, but resumed no more.
        tenant_id: whose it is. `engine` may be the tenant's own (`tenancy.engine_of`) or not.

    Raises:
        RowsRejectedError: bad rows, and `skip_faults` is off or no good row is left.
        LimitReachedError: a limit of the tenant leaves no room for it. Resuming takes none.
        InputError: there is no row at all (`empty_file`).
    """
    with engine.begin() as connection:
        connection.execute(text(_INCOMING))
        fingerprint = _stream(connection, rows, options)
        connection.execute(text("ANALYZE incoming"))
        connection.execute(text(_MARK_DUPLICATES))
        good, bad = connection.execute(
            text("SELECT count(*) FILTER (WHERE code IS NULL), count(code) FROM incoming")
        ).one()
        faults = tuple(RowFault(*row) for row in connection.execute(text(_FAULTS), {"n": SHOWN_FAULTS}))
        _judge(good, bad, faults, skip_faults=skip_faults)
        same = and_(Job.tenant_id == tenant_id, Job.fingerprint == fingerprint, Job.resumable)
        if new:
            connection.execute(update(Job).where(same).values(resumable=False))
        job = {
            "tenant_id": tenant_id,
            "source_name": source_name,
            "fingerprint": fingerprint,
            "questions_total": good,
            "shard_size": shard_size,
            "row_errors": bad,
        }
        while (job_id := _insert_job(connection, options, job)) is None:
            known = connection.execute(select(Job.id, Job.questions_total, Job.row_errors).where(same)).one_or_none()
            # None: cancelled between the two statements; then the place is free.
            if known is not None:
                return Recorded(known.id, created=False, questions=known.questions_total, row_errors=known.row_errors)
        require_room(connection, tenant_id, job_id, good)
        connection.execute(text(_INSERT_QUESTIONS), {"job_id": job_id})
        connection.execute(text(_INSERT_FAULTS), {"job_id": job_id})
        connection.execute(text(_INSERT_SHARDS), {"job_id": job_id, "size": shard_size, "total": good})
    return Recorded(job_id, created=True, questions=good, row_errors=bad, faults=faults)


def queued_shards(engine: Engine, job_id: UUID) -> list[ShardMessage]:
    """The messages of a job's queued shards, marked as sent now."""
    with engine.begin() as connection:
        lock_job(connection, job_id)
        rows = connection.execute(
            update(Shard)
            .where(Shard.job_id == job_id, Shard.state == "queued", Job.id == Shard.job_id, Job.state == "in_progress")
            .values(enqueued_at=func.clock_timestamp())
            .returning(Shard.shard_no, Job.queue, Shard.end_idx - Shard.start_idx)
        ).all()
    return [ShardMessage(job_id, shard_no, queue, questions) for shard_no, queue, questions in sorted(rows)]


def _insert_job(connection: Connection, options: AnswerOptions, job: dict[str, Any]) -> UUID | None:
    """Insert a job; None where another has the fingerprint, whose transaction is waited for."""
    return connection.execute(
        insert(Job)
        .values(
            id=uuid4(),
            state="in_progress",
            collection=options.collection,
            resumable=True,
            options=options.model_dump(mode="json"),
            queue=options.queue,
            **job,
        )
        .on_conflict_do_nothing(index_elements=["tenant_id", "fingerprint"], index_where=text("resumable"))
        .returning(Job.id)
    ).scalar_one_or_none()


def _stream(connection: Connection, rows: Iterable[ParsedRow | RowFault], options: AnswerOptions) -> str:
    """COPY the rows into `incoming`; returns the SHA-256 of what they and the options ask."""
    digest = hashlib.sha256(options.model_dump_json().encode())
    driver = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        for row in rows:
            if isinstance(row, ParsedRow):
                asked = json.dumps([row.custom_id, row.text, row.row_options], sort_keys=True)
                digest.update(asked.encode())
                copy.write_row((row.line, row.custom_id, row.text, Jsonb(row.row_options), None, None, None))
            else:
                copy.write_row((row.line, row.custom_id, None, None, row.code, row.message, row.advice))
    return digest.hexdigest()


def _judge(good: int, bad: int, faults: tuple[RowFault, ...], *, skip_faults: bool) -> None:
    if bad and not skip_faults:
        raise RowsRejectedError(faults, bad, "Correct them, or leave them out with --on-error skip.")
    if bad and not good:
        raise RowsRejectedError(faults, bad, "No row is left to ask.")
    if not good:
        raise InputError("The file holds no question.", "Write one question a line.", code="empty_file")
