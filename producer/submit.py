"""Submitting a file: everything is checked before anything is recorded, and recorded before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from producer.formats import Format, detect
from producer.records import read_records
from producer.rows import fitted, parse_row
from producer.source import Source, open_source
from ragspec.corpus.store import check_collection
from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.database import connect, reachable
from ragspec.jobs.intake import Recorded, queued_shards, record_job
from ragspec.jobs.options import AnswerOptions
from ragspec.jobs.row import ParsedRow, RowFault
from ragspec.queue import celery_app, check_broker, send_shards
from ragspec.settings import Settings

OnError = Literal["fail", "skip"]


@dataclass(frozen=True, slots=True)
class Submitted:
    """What a submission came to.

    Attributes:
        recorded: the job in the database.
        enqueued: messages sent.
    """

    recorded: Recorded
    enqueued: int


def submit(
    settings: Settings,
    path: str,
    options: AnswerOptions,
    *,
    file_format: Format | None = None,
    shard_size: int | None = None,
    on_error: OnError = "fail",
    new: bool = False,
) -> Submitted:
    """Record a file's questions as a job and send its shards; the same file and options resume the earlier job.

    Should Redis die between the two, the job is recorded and nothing is lost: the workers' sweep sends the shards.

    Args:
        settings: where the services are.
        path: the file; `-` is standard input.
        options: the job's.
        file_format: overrides what the file's name and first bytes tell.
        shard_size: questions per message; default `settings.shard_size`.
        on_error: `fail` records nothing if one row is bad, `skip` records the bad rows as such and goes on.
        new: answer again what was answered before.

    Raises:
        InputError: the file, a row, or the collection's name or embedder.
        NotFoundError: the file or the collection.
        ServiceUnavailableError: Redis, PostgreSQL or Chroma does not answer.
    """
    engine = connect(settings.require_database())
    app = celery_app(settings)
    try:
        with open_source(path) as source, reachable(engine):
            parsed = read_rows(source, file_format or detect(source))
            rows = (fitted(row, options) if isinstance(row, ParsedRow) else row for row in parsed)
            check_collection(settings, options.collection)
            check_broker(app)
            recorded = record_job(
                engine,
                rows,
                options,
                source_name=_source_name(path),
                shard_size=shard_size or settings.shard_size,
                skip_faults=on_error == "skip",
                new=new,
            )
            messages = queued_shards(engine, recorded.job_id)
    finally:
        engine.dispose()
    try:
        return Submitted(recorded, send_shards(app, messages))
    except ServiceUnavailableError as error:
        raise ServiceUnavailableError(
            f"Job {recorded.job_id} is recorded, but its shards were not all enqueued. {error.message}",
            "Nothing is lost: the workers' sweep enqueues them once Redis is back.",
        ) from error


def _source_name(path: str) -> str:
    if path == "-":
        return path
    # A name that is not UTF-8 comes from the system with half surrogates in it, which a database does not take.
    return str(Path(path).absolute()).encode(errors="replace").decode()


def read_rows(source: Source, file_format: Format) -> Iterator[ParsedRow | RowFault]:
    """The file's rows, judged one by one."""
    for record in read_records(source, file_format):
        yield record if isinstance(record, RowFault) else parse_row(*record)
