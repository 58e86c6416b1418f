"""`ragspec submit`, `status`, `jobs`, `cancel`, `retry`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from ragspec.errors import InputError
from ragspec.settings import MAX_SHARD_SIZE, load_settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from ragspec.jobs.options import AnswerOptions
    from ragspec.jobs.status import JobStatus

#: Written out so that `--help` imports no reader; a test holds it against `producer.formats.FORMATS`.
FILE_FORMATS = ("jsonl", "csv", "tsv", "parquet", "text")


@click.command()
@click.argument("file")
@click.option("--collection", required=True, help="Collection to retrieve from.")
@click.option("--format", "file_format", type=click.Choice(FILE_FORMATS), help="Format, where the name does not say.")
@click.option("--top-k", type=int, help="Passages per question. [default: 3]")
@click.option(
    "--max-tokens", type=int, help="Longest answer, in tokens; never longer than the window leaves. [default: 128]"
)
@click.option("--temperature", type=float, help="0 takes the likeliest token. [default: 0]")
@click.option("--top-p", type=float, help="Nucleus to sample from. [default: 1]")
@click.option("--seed", type=int, help="Makes sampling repeatable. [default: 0]")
@click.option("--stop", multiple=True, help="String that ends an answer; may be given several times.")
@click.option("--min-tokens", type=int, help="No end token and no --stop before so many tokens. [default: 0]")
@click.option("--repetition-penalty", type=float, help="Over 1 disfavours tokens of prompt and answer. [default: 1]")
@click.option("--presence-penalty", type=float, help="Over 0 disfavours tokens of the answer, up to 2. [default: 0]")
@click.option("--frequency-penalty", type=float, help="The same for each time they occur, up to 2. [default: 0]")
@click.option(
    "--no-speculation",
    is_flag=True,
    help="Decode plainly, slower; int8 and float32 give the same answers, bfloat16 the same up to near ties.",
)
@click.option("--priority", type=click.Choice(["bulk", "interactive"]), default="bulk", help="Queue to wait in.")
@click.option(
    "--shard-size", type=click.IntRange(1, MAX_SHARD_SIZE), help="Questions per message. [default: RAGSPEC_SHARD_SIZE]"
)
@click.option("--new", is_flag=True, help="Answer again even if this file was submitted before.")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    help="One bad row: record nothing, or leave it out. [default: fail]",
)
@click.option("--wait", is_flag=True, help="Watch the job until it is finished.")
@click.option("--json", "as_json", is_flag=True, help="Print the job's status as one JSON object.")
def submit(
    *,
    file: str,
    file_format: Any,
    shard_size: int | None,
    on_error: Any,
    new: bool,
    wait: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Enqueue the questions of FILE (`-` is standard input) as a job.

    JSON Lines, CSV, TSV, Parquet, plain text with one question a line, OpenAI Batch lines; each may be gzipped.
    Submitting the same rows with the same options again resumes the job instead of answering twice. The model, the prompt
    template and RAGSPEC_ON_NO_CONTEXT are no part of that: after changing one, answer again with --new.

    \b
    Example:
      ragspec submit questions.jsonl --collection handbook --wait
    """
    from producer.submit import submit as submit_file
    from ragspec.cli.count import counted
    from ragspec.cli.database import job_database
    from ragspec.cli.progress import exit_status, summary, watch_job
    from ragspec.jobs.status import job_status

    settings = load_settings()
    submitted = submit_file(
        settings,
        file,
        _options(**options),
        file_format=file_format,
        shard_size=shard_size,
        on_error=on_error,
        new=new,
    )
    recorded = submitted.recorded
    for fault in recorded.faults:
        click.echo(f"skipped {fault}", err=True)
    if recorded.row_errors > len(recorded.faults):
        click.echo(f"skipped {counted(recorded.row_errors, 'row')} in all when the job was recorded", err=True)
    if not as_json:
        click.echo(recorded.job_id)
    shards = counted(submitted.enqueued, "shard")
    if recorded.created:
        click.echo(f"recorded {counted(recorded.questions, 'question')}, enqueued {shards}", err=True)
    with job_database(settings) as engine:
        status = job_status(engine, recorded.job_id)
        if not recorded.created:
            click.echo(_resumed(status, shards), err=True)
        if wait:
            status = watch_job(engine, recorded.job_id)
    if as_json:
        created = {"created": recorded.created, "enqueued": submitted.enqueued}
        click.echo(json.dumps({**status.as_json(), **created}, indent=2))
    elif status.finished and not wait:
        click.echo(summary(status), err=True)
    if wait:
        sys.exit(exit_status(status))


@click.command()
@click.argument("job", required=False)
@click.option("--watch", is_flag=True, help="Stay until the job is finished; without JOB, the newest.")
@click.option("--json", "as_json", is_flag=True, help="JSON: one object for JOB, a list without.")
def status(*, job: str | None, watch: bool, as_json: bool) -> None:
    """Show the progress of JOB (an id, the beginning of one, or `last`), or of every unfinished job."""
    from ragspec.cli.database import job_database
    from ragspec.cli.progress import exit_status, watch_job
    from ragspec.jobs.status import find_job, job_status, list_jobs

    with job_database(load_settings()) as engine:
        if job is None and not watch:
            unfinished = list_jobs(engine, unfinished=True)
            _print_jobs(unfinished, as_json=as_json, none="no unfinished jobs; `ragspec jobs` lists all")
            return
        job_id = find_job(engine, job or "last")
        found = watch_job(engine, job_id) if watch else job_status(engine, job_id)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    elif not watch:
        _print_status(found)
    if watch:
        sys.exit(exit_status(found))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON list.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Newest first, at most so many."
)
def jobs(*, as_json: bool, limit: int) -> None:
    """List jobs, newest first."""
    from ragspec.cli.database import job_database
    from ragspec.jobs.status import list_jobs

    with job_database(load_settings()) as engine:
        _print_jobs(list_jobs(engine, limit=limit), as_json=as_json, none="no jobs")


@click.command()
@click.argument("job")
def cancel(*, job: str) -> None:
    """Cancel JOB; answers so far are kept."""
    from ragspec.cli.database import job_database
    from ragspec.jobs.cancel import cancel_job
    from ragspec.jobs.status import find_job

    with job_database(load_settings()) as engine:
        job_id = find_job(engine, job)
        click.echo(f"{job_id} {cancel_job(engine, job_id)}")


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Watch the job until it is finished.")
def retry(*, job: str, wait: bool) -> None:
    """Run JOB's failed rows again; completed answers stay as they are."""
    from ragspec.cli.count import counted
    from ragspec.cli.database import job_database
    from ragspec.cli.progress import exit_status, watch_job
    from ragspec.jobs.status import find_job
    from ragspec.queue import celery_app, check_broker

    settings = load_settings()
    app = celery_app(settings)
    check_broker(app)
    with job_database(settings) as engine:
        job_id = find_job(engine, job)
        rows = _retry(engine, job_id, app)
        click.echo(f"{job_id} {counted(rows, 'row')} will run again" if rows else f"{job_id} has no failed rows")
        if wait:
            sys.exit(exit_status(watch_job(engine, job_id)))


def _retry(engine: Engine, job_id: UUID, app: Any) -> int:
    from ragspec.jobs.intake import queued_shards
    from ragspec.jobs.retry import retry_failed
    from ragspec.queue import send_shards

    rows = retry_failed(engine, job_id)
    if rows:
        send_shards(app, queued_shards(engine, job_id))
    return rows


def _options(*, no_speculation: bool, priority: Any, **given: Any) -> AnswerOptions:
    from pydantic import ValidationError

    from ragspec.jobs.options import AnswerOptions

    if "" in given["stop"]:
        raise InputError("--stop is empty.", "It would end every answer at once.", code="bad_option")
    asked = {name: value for name, value in given.items() if value is not None}
    try:
        return AnswerOptions(**asked, speculation=not no_speculation, queue=priority)
    except ValidationError as error:
        fault = error.errors()[0]
        option = "--" + str(fault["loc"][0]).replace("_", "-")
        raise InputError(f"{option} {fault['input']}: {fault['msg']}.", code="bad_option") from None


def _resumed(status: JobStatus, shards: str) -> str:
    created = status.created_at.isoformat(sep=" ", timespec="minutes")
    return (
        f"resumed job {status.job_id}, submitted {created}; {status.answered} of {status.questions} already answered, "
        f"enqueued {shards}. Answer again (after changing model or template, say) with --new."
    )


def _print_status(found: JobStatus) -> None:
    from ragspec.cli.progress import summary

    click.echo(f"{found.job_id} {summary(found)}")
    rows = {
        "source": found.source_name,
        "collection": found.collection,
        "queue": found.queue,
        "shards": f"{found.shards_done} done, {found.shards_running} running, {found.shards_queued} queued",
        "acceptance": f"{found.accepted_draft_tokens}/{found.draft_tokens} draft tokens accepted "
        f"({found.draft_acceptance_rate:.1%}), {found.mean_acceptance_length:.2f} tokens/step",
        "created": found.created_at.isoformat(timespec="seconds"),
        "elapsed": f"{found.elapsed_s:.1f} s",
        "error": found.error,
    }
    for name, value in rows.items():
        if value:
            click.echo(f"  {name:<11} {value}")


def _print_jobs(found: list[JobStatus], *, as_json: bool, none: str) -> None:
    from ragspec.cli.progress import summary

    if as_json:
        click.echo(json.dumps([status.as_json() for status in found], indent=2))
        return
    if not found:
        click.echo(none, err=True)
    for status in found:
        created = status.created_at.isoformat(sep=" ", timespec="minutes")
        click.echo(f"{status.job_id}  {created}  {status.source_name}  {status.collection}  {summary(status)}")
