"""A job's answers on their way out: streamed from a server-side cursor, written to a file that appears whole."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, get_args
from uuid import UUID

from sqlalchemy import Engine, and_, select

from ragspec.errors import NotFoundError, RagspecError
from ragspec.jobs.answer import Answer
from ragspec.jobs.row import RowFault
from ragspec.jobs.tables import AnswerRow, QuestionRow, RowError

ExportFormat = Literal["jsonl", "csv", "parquet", "openai"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
#: Rows fetched at once: a few hundred kilobytes with passages and token arrays.
_FETCH = 200
_ANSWER_FIELDS = tuple(Answer.__dataclass_fields__)


def stream_answers(engine: Engine, job_id: UUID) -> Iterator[tuple[str, str, Answer]]:
    """(custom_id, question, answer) of every question answered so far, in the file's order.

    A running job gives what it has; the cursor sees the moment at which it was opened.
    """
    with engine.connect() as connection:
        cursor = connection.execution_options(yield_per=_FETCH).execute(_answers(job_id).order_by(AnswerRow.idx))
        for custom_id, question, *fields in cursor:
            yield custom_id, question, Answer(**dict(zip(_ANSWER_FIELDS, fields, strict=True)))


def find_answer(engine: Engine, job_id: UUID, name: str) -> tuple[str, str, Answer]:
    """(custom_id, question, answer) of one question, named by its custom_id or else its idx.

    Raises:
        NotFoundError: the job has no such question (`unknown_question`), its row was skipped (`skipped_row`), or it is not
            answered yet (`unanswered`).
    """
    named = QuestionRow.custom_id == name
    with engine.connect() as connection:
        ids = select(QuestionRow.idx).where(QuestionRow.job_id == job_id)
        idx = connection.execute(ids.where(named)).scalar_one_or_none()
        # Longer numbers than an int4 holds name no question.
        if idx is None and name.isdecimal() and len(name) < 10:
            idx = connection.execute(ids.where(QuestionRow.idx == int(name))).scalar_one_or_none()
        if idx is None:
            fault = select(RowError.line, RowError.message).where(RowError.job_id == job_id, RowError.custom_id == name)
            if skipped := connection.execute(fault.order_by(RowError.line).limit(1)).one_or_none():
                line, why = skipped
                raise NotFoundError(
                    f"Line {line}, {name}, was skipped when the job was submitted: {why}", code="skipped_row"
                )
            raise NotFoundError(f"Job {job_id} has no question {name}.", code="unknown_question")
        row = connection.execute(_answers(job_id).where(AnswerRow.idx == idx)).one_or_none()
    if row is None:
        raise NotFoundError(f"Question {name} is not answered yet.", code="unanswered")
    custom_id, question, *fields = row
    return custom_id, question, Answer(**dict(zip(_ANSWER_FIELDS, fields, strict=True)))


def stream_skipped(engine: Engine, job_id: UUID) -> Iterator[RowFault]:
    """The rows of the file that were skipped when the job was submitted, in the file's order."""
    query = (
        select(RowError.line, RowError.code, RowError.message, RowError.advice, RowError.custom_id)
        .where(RowError.job_id == job_id)
        .order_by(RowError.line)
    )
    with engine.connect() as connection:
        for row in connection.execution_options(yield_per=_FETCH).execute(query):
            yield RowFault(*row)


def export_answers(engine: Engine, job_id: UUID, export_format: ExportFormat, output: str) -> int:
    """Write a job's answers so far; returns how many.

    Args:
        engine: the database.
        job_id: the job.
        export_format: see docs/reference/tables.md for what each holds.
        output: a path, replaced in one step when all is written; `-` is standard output.

    Raises:
        RagspecError: the file cannot be written (`unwritable_output`).
    """
    from ragspec.jobs import writers

    answers = stream_answers(engine, job_id)
    with _output(output) as file:
        match export_format:
            case "jsonl":
                return writers.write_jsonl(file, answers)
            case "csv":
                return writers.write_csv(file, answers)
            case "parquet":
                return writers.write_parquet(file, answers)
            case "openai":
                return writers.write_openai(file, job_id, answers, stream_skipped(engine, job_id))


@contextmanager
def _output(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    # A link is followed, and what is no file (a device, a pipe) is written to, not replaced.
    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as file:
                yield file
            return
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                # Such files are made for their owner alone; an export is a file like any other.
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(file.fileno(), 0o666 & ~umask)
                Path(file.name).replace(target)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise RagspecError(f"{path} cannot be written: {error.strerror}.", code="unwritable_output") from error


def _answers(job_id: UUID) -> Any:
    columns = (AnswerRow.__table__.columns[name] for name in _ANSWER_FIELDS)
    return (
        select(QuestionRow.custom_id, QuestionRow.text, *columns)
        .join(QuestionRow, and_(QuestionRow.job_id == AnswerRow.job_id, QuestionRow.idx == AnswerRow.idx))
        .where(AnswerRow.job_id == job_id)
    )
