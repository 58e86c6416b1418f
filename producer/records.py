"""The rows of a question file, as its format has them: a mapping of fields, not yet judged by what it asks."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from producer.formats import Format
from producer.rows import KNOWN_FIELDS, QUESTION_FIELDS
from producer.source import Source, seekable
from ragspec.errors import InputError
from ragspec.jobs.options import MAX_QUESTION_CHARS
from ragspec.jobs.row import RowFault
from ragspec.streams import MAX_LINE_BYTES, bounded_lines

#: Where a row starts, and its fields.
Record = tuple[int, Mapping[str, Any]]
#: Parquet rows in memory at once: few, since each may hold a question of any length.
_PARQUET_ROWS = 64


def read_records(
    source: Source, file_format: Format, *, columns: Collection[str] = KNOWN_FIELDS
) -> Iterator[Record | RowFault]:
    """The rows of a file, one by one; blank lines are passed over.

    Args:
        source: the file.
        file_format: its format.
        columns: those that are read of a format which lets one choose, Parquet.

    Raises:
        InputError: the file as a whole cannot be used (`missing_question`, `corrupt_parquet`, `corrupt_gzip`).
    """
    readers: dict[Format, Callable[[Source], Iterator[Record | RowFault]]] = {
        "jsonl": _jsonl,
        "csv": lambda source: _delimited(source, ","),
        "tsv": lambda source: _delimited(source, "\t"),
        "parquet": lambda source: _parquet(source, columns),
        "text": _text,
    }
    return readers[file_format](source)


def _decoded(source: Source) -> Iterator[tuple[int, str] | RowFault]:
    for number, line in bounded_lines(source.stream):
        if line is None:
            yield RowFault(
                number,
                "question_too_long",
                f"The line has more than {MAX_LINE_BYTES} bytes.",
                f"A question may have {MAX_QUESTION_CHARS} characters.",
            )
            continue
        try:
            decoded = line.decode()
        except UnicodeDecodeError as error:
            yield RowFault(
                number,
                "not_utf8",
                f"Byte {error.start + 1} of the line, 0x{line[error.start]:02x}, is not UTF-8.",
                "Save the file as UTF-8.",
            )
            continue
        yield number, decoded


def _written(source: Source) -> Iterator[tuple[int, str] | RowFault]:
    """The lines that are not blank."""
    return (line for line in _decoded(source) if isinstance(line, RowFault) or line[1].strip())


def _text(source: Source) -> Iterator[Record | RowFault]:
    for line in _written(source):
        yield line if isinstance(line, RowFault) else (line[0], {"question": line[1]})


def _jsonl(source: Source) -> Iterator[Record | RowFault]:
    for line in _written(source):
        if isinstance(line, RowFault):
            yield line
            continue
        number, written = line
        try:
            value = json.loads(written)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            yield RowFault(number, "invalid_json_line", f"Not JSON: {reason}.", "Write one JSON object a line.")
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            yield RowFault(
                number, "invalid_json_line", "JSON, but not an object.", 'Write {"question": "..."} on each line.'
            )


def _delimited(source: Source, delimiter: str) -> Iterator[Record | RowFault]:
    header: list[str] | None = None
    for row in _csv_rows(source, delimiter):
        if isinstance(row, RowFault):
            yield row
            continue
        line, values = row
        if header is None:
            header = _checked_header([name.strip() for name in values])
        elif len(values) > len(header):
            yield RowFault(
                line,
                "bad_csv_row",
                f"The row has {len(values)} fields and the header {len(header)}.",
                "Quote fields that hold the delimiter.",
            )
        else:
            yield line, {name: value for name, value in zip(header, values, strict=False) if value}


def _csv_rows(source: Source, delimiter: str) -> Iterator[tuple[int, list[str]] | RowFault]:
    """Rows that are not blank, with the line they start on; a quoted field may hold line breaks."""
    faults: list[RowFault] = []
    start = last = 0

    def feed() -> Iterator[str]:
        nonlocal start, last
        for line in _decoded(source):
            if isinstance(line, RowFault):
                faults.append(line)
                continue
            last = line[0]
            start = start or last
            yield line[1] + "\n"

    # strict: a stray quote is a fault of its row, not a question with half a file in it.
    reader = csv.reader(feed(), delimiter=delimiter, strict=True)
    while True:
        start = 0
        row: tuple[int, list[str]] | RowFault | None = None
        try:
            values = next(reader, None)
        except csv.Error as error:
            row = _csv_fault(start, last, str(error))
        else:
            if values is None:
                yield from faults
                return
            if any(value.strip() for value in values):
                row = start, values
        yield from faults
        faults.clear()
        if row is not None:
            yield row


def _csv_fault(start: int, last: int, reason: str) -> RowFault:
    """What is wrong with the row that was read from line `start` to line `last`, given what the csv module says."""
    if "field limit" in reason:  # where it stops reading on behind a quote that is never closed
        what = f"A field that begins in this row has more than {csv.field_size_limit()} characters by line {last}."
        return RowFault(start, "question_too_long", what, "See whether its quote is closed.")
    if "unexpected end of data" in reason:
        what = f"A quote that opens in this row is never closed: the file was read as one field up to its end, line {last}."
        return RowFault(start, "unclosed_quote", what, "Close it; nothing behind it was read as rows.")
    return RowFault(start, "bad_csv_row", f"Not a row: {reason}.", 'Put a field with quotes in it as "say ""so""".')


def _parquet(source: Source, columns: Collection[str]) -> Iterator[Record | RowFault]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with seekable(source) as file:
        try:
            # Without pre_buffer and with a small buffer, a row group is read page by page.
            table = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**16)
            names = _checked_header([name for name in table.schema_arrow.names if name in columns])
            number = 0
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=names):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: value for name, value in row.items() if value is not None}
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{source.name} is a damaged Parquet file: {error}.", "Write it again.", code="corrupt_parquet"
            ) from error


def _checked_header(names: list[str]) -> list[str]:
    if not {*QUESTION_FIELDS, "body"} & set(names):
        raise InputError(
            "No column holds the questions.", f"Name it {', '.join(QUESTION_FIELDS)}.", code="missing_question"
        )
    return names
