"""Reads passages out of JSONL, one a line, streaming: `{"id": ..., "text": ..., "title": ..., "metadata": {...}}`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from ragspec.corpus.parse import decode_utf8
from ragspec.errors import InputError
from ragspec.streams import MAX_LINE_BYTES, bounded_lines, is_gzip


@dataclass(frozen=True, slots=True)
class GivenPassage:
    """A passage that its user cut and named.

    Attributes:
        line: where it stands, from 1.
        id: the user's name for it, kept as the passage's id.
        text: kept whole.
        title: or empty.
        metadata: the row's, with any further keys of the row.
    """

    line: int
    id: str
    text: str
    title: str
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that holds no passage."""

    line: int
    error: InputError


def read_passages(path: Path) -> Iterator[GivenPassage | BadLine]:
    """Each line's passage, or what is wrong with it; empty lines are passed over.

    Raises:
        InputError: the file cannot be opened or unpacked any further (code `unreadable_file`), or it is called gzip and is
            none (code `not_gzip`).
    """
    try:
        with _open(path) as stream:
            for number, line in bounded_lines(stream):
                if line is not None and not line.strip():
                    continue
                try:
                    yield _passage(number, line)
                except InputError as error:
                    yield BadLine(number, error)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"It cannot be read: {error}.", code="unreadable_file") from error


@contextmanager
def _open(path: Path) -> Iterator[BufferedReader[Any]]:
    with path.open("rb") as stream:
        if path.suffix.lower() != ".gz":
            yield stream
            return
        if stream.peek(1) and not is_gzip(stream):
            raise InputError("It is not gzip, though its name ends with .gz.", "Rename it, or zip it.", code="not_gzip")
        with BufferedReader(gzip.GzipFile(fileobj=stream)) as unzipped:
            yield unzipped


def _passage(number: int, line: bytes | None) -> GivenPassage:
    if line is None:
        raise InputError(
            f"The line has more than {MAX_LINE_BYTES} bytes.", "Cut its text into passages.", code="line_too_long"
        )
    try:
        row = json.loads(decode_utf8(line))
    except (ValueError, RecursionError) as error:
        raise InputError(f"The line is not JSON: {error}.", code="invalid_json_line") from None
    if not isinstance(row, dict):
        raise InputError("The line is not a JSON object.", code="invalid_json_line")
    id_, text = row.pop("id", None), row.pop("text", None)
    title, metadata = row.pop("title", None), row.pop("metadata", None)
    if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
        raise _bad("id", "a string or a whole number")
    if not isinstance(text, str) or not text.strip():
        raise _bad("text", "a string that is not blank")
    if not isinstance(title, str | None):
        raise _bad("title", "a string")
    if not isinstance(metadata, dict | None):
        raise _bad("metadata", "an object")
    if _has_surrogate(f"{id_}{text}{title}{json.dumps([row, metadata], ensure_ascii=False)}"):
        raise InputError("The line holds half a surrogate pair (`\\ud800`), which is no text.", code="bad_passage")
    return GivenPassage(number, str(id_), text, title or "", {**row, **(metadata or {})})


def _bad(field: str, needed: str) -> InputError:
    return InputError(f"`{field}` must be {needed}.", code="bad_passage")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
