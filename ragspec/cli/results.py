"""`ragspec results`, `show`, `evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from ragspec.errors import InputError
from ragspec.settings import load_settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from ragspec.evaluation import Gold

#: What `ragspec evaluate` reads beside the question.
GOLD_FIELDS = ("answers", "answer", "passage_id")
#: Written out so that `--help` imports no database; a test holds it against `ragspec.jobs.export.EXPORT_FORMATS`.
EXPORT_FORMATS = ("jsonl", "csv", "parquet", "openai")


@click.command()
@click.argument("job")
@click.option("--format", "export_format", type=click.Choice(EXPORT_FORMATS), default="jsonl", show_default=True)
@click.option("-o", "--output", default="-", help="File, replaced in one step; `-` is standard output. [default: -]")
def results(*, job: str, export_format: Any, output: str) -> None:
    """Export JOB's answers so far; a running job gives what it has.

    \b
    Example:
      ragspec results last --format jsonl -o answers.jsonl
    """
    from ragspec.cli.count import counted
    from ragspec.cli.database import job_database
    from ragspec.jobs.export import export_answers
    from ragspec.jobs.status import find_job

    with job_database(load_settings()) as engine:
        written = export_answers(engine, find_job(engine, job), export_format, output)
    click.echo(counted(written, "answer"), err=True)


@click.command()
@click.argument("job")
@click.argument("name", metavar="ID")
def show(*, job: str, name: str) -> None:
    """Show one answer of JOB: its tokens coloured by who proposed them, its verify steps and its passages.

    ID is the question's custom_id, or its place in the file from 0.
    """
    from ragspec.cli.answer import print_answer
    from ragspec.cli.database import job_database
    from ragspec.cli.tokens import token_texts
    from ragspec.jobs.export import find_answer
    from ragspec.jobs.status import find_job

    settings = load_settings()
    with job_database(settings) as engine:
        custom_id, question, answer = find_answer(engine, find_job(engine, job), name)
    print_answer(custom_id, question, answer, token_texts(settings, answer))


@click.command()
@click.argument("job")
@click.option("--answers", "path", help="File with `answers` and `passage_id`. [default: the file that was submitted]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def evaluate(*, job: str, path: str | None, as_json: bool) -> None:
    """Score JOB against the `answers` of its question file: SQuAD exact match and F1, recall of the gold passage.

    `contains` is the share of answers in which a gold answer stands, among other words or alone, normalised as for the
    exact match: a small model answers in sentences, which hardly ever match exactly. Long answers contain more by chance.

    Rows are matched by custom_id. A failed answer counts as wrong; a question not answered yet does not count.
    """
    from ragspec.cli.database import job_database
    from ragspec.evaluation import score
    from ragspec.jobs.status import find_job, job_status

    with job_database(load_settings()) as engine:
        job_id = find_job(engine, job)
        source = path or job_status(engine, job_id).source_name
        gold = _read_gold(source)
        scores = score(_judged(engine, job_id, gold))
    if not scores.scored and not scores.ranked:
        raise InputError(
            f"No answered question of the job has gold answers in {source}.",
            "Name the file with --answers; its rows need the job's custom_id and `answers` or `passage_id`.",
            code="no_gold",
        )
    if as_json:
        click.echo(json.dumps({"job_id": str(job_id), "gold": len(gold), **asdict(scores)}, indent=2))
        return
    if scores.scored:
        click.echo(f"exact match  {scores.exact_match:.1%}  of {scores.scored}")
        click.echo(f"contains     {scores.contains:.1%}  of {scores.scored}")
        click.echo(f"F1           {scores.f1:.1%}  of {scores.scored}")
    if scores.ranked:
        click.echo(f"recall@{scores.k:<5} {scores.recall:.1%}  of {scores.ranked}")


def _read_gold(path: str) -> dict[str, Gold]:
    from producer.formats import detect
    from producer.records import read_records
    from producer.rows import KNOWN_FIELDS, parse_row
    from producer.source import open_source
    from ragspec.evaluation import Gold
    from ragspec.jobs.row import ParsedRow, RowFault

    gold: dict[str, Gold] = {}
    with open_source(path) as source:
        for record in read_records(source, detect(source), columns={*KNOWN_FIELDS, *GOLD_FIELDS}):
            if isinstance(record, RowFault):
                continue
            line, fields = record
            row = parse_row(line, fields)
            if isinstance(row, ParsedRow):
                gold[row.custom_id] = Gold(_gold_answers(fields), _passage_id(fields))
    return gold


def _gold_answers(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """A list of texts, one text, a JSON list in a CSV cell, or SQuAD's own `{"text": [...]}`."""
    given = fields.get("answers", fields.get("answer"))
    if isinstance(given, str) and given.startswith("["):
        try:
            given = json.loads(given)
        except ValueError:
            return (str(given),)
    if isinstance(given, Mapping):
        given = given.get("text")
    if isinstance(given, str):
        return (given,)
    return tuple(str(answer) for answer in given) if isinstance(given, list) else ()


def _passage_id(fields: Mapping[str, Any]) -> str | None:
    given = fields.get("passage_id")
    return None if given is None else str(given)


def _judged(
    engine: Engine, job_id: UUID, gold: Mapping[str, Gold]
) -> Iterator[tuple[Gold, str | None, Sequence[Mapping[str, Any]]]]:
    from ragspec.jobs.export import stream_answers

    for custom_id, _, answer in stream_answers(engine, job_id):
        if custom_id in gold:
            yield gold[custom_id], answer.text if answer.status == "completed" else None, answer.passages
