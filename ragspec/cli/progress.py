"""Watching a job: a live bar on a terminal, a line now and then elsewhere. All of it goes to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from uuid import UUID

import click
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from ragspec.cli.count import counted
from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.status import JobStatus, job_status

#: Exit status of a watched job that ended with failed rows or was cancelled.
INCOMPLETE = 3
#: Seconds between two looks at the database, and at most so many between two lines where there is no terminal.
_POLL_S = 0.5
_LINE_S = 10.0
#: Seconds for which a database that does not answer is asked again; a restart fits in.
_PATIENCE_S = 60.0


def watch_job(engine: Engine, job_id: UUID) -> JobStatus:
    """Show a job's progress until it is finished; Ctrl-C leaves it running, says so and ends the program with 130."""
    try:
        return _bar(engine, job_id) if sys.stderr.isatty() else _lines(engine, job_id)
    except KeyboardInterrupt:
        click.echo(f"\nJob {job_id} goes on without you: ragspec status {job_id} --watch", err=True)
        sys.exit(130)


def summary(status: JobStatus) -> str:
    """A job in one line."""
    parts = [f"{status.answered}/{status.questions} answered"]
    if status.failed:
        parts.append(f"{status.failed} failed")
    if status.row_errors:
        parts.append(f"{counted(status.row_errors, 'row')} skipped")
    if status.questions_per_second:
        parts.append(f"{status.questions_per_second:.2f} questions/s")
    if status.verify_steps:
        parts.append(f"{status.mean_acceptance_length:.2f} tokens/step")
    return f"{status.state}: {', '.join(parts)}"


def exit_status(status: JobStatus) -> int:
    """What a command that watched the job to its end exits with."""
    return 0 if status.state == "completed" and not status.failed else INCOMPLETE


def _polled(engine: Engine, job_id: UUID) -> Iterator[JobStatus]:
    while True:
        status = _patiently(engine, job_id)
        yield status
        if status.finished:
            return
        time.sleep(_POLL_S)


def _patiently(engine: Engine, job_id: UUID) -> JobStatus:
    """The job's status, asked again while PostgreSQL restarts: workers ride through that, and so does who watches them."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return job_status(engine, job_id)
        except OperationalError as error:
            if time.monotonic() >= give_up_at:
                raise ServiceUnavailableError(
                    f"PostgreSQL has not answered for {_PATIENCE_S:.0f} s; job {job_id} is recorded and goes on when it does.",
                    f"Then watch it again: ragspec status {job_id} --watch",
                ) from error
            time.sleep(_POLL_S)


def _lines(engine: Engine, job_id: UUID) -> JobStatus:
    last_line, last_time = "", 0.0
    for status in _polled(engine, job_id):
        line = summary(status)
        if status.finished or (line != last_line and time.monotonic() - last_time >= _LINE_S):
            click.echo(line, err=True)
            last_line, last_time = line, time.monotonic()
    return status


def _bar(engine: Engine, job_id: UUID) -> JobStatus:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(compact=True),
    )
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        task = progress.add_task("queued", total=None, rates="")
        for status in _polled(engine, job_id):
            failed = f"[red]{status.failed} failed[/red]  " if status.failed else ""
            progress.update(
                task,
                total=status.questions,
                completed=status.answered,
                description="queued" if status.started_at is None and not status.finished else status.state,
                rates=f"{failed}{status.questions_per_second:.2f}/s  {status.mean_acceptance_length:.2f} tokens/step",
            )
    return status
