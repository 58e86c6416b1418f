"""Reads passages out of JSONL, one a line, streaming: `{"id": ..., "text": ..., "title": ..., "metadata": {...}}`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ragspec.corpus.parse import decode_utf8
from ragspec.errors import InputError


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
        InputError: code `unreadable_file`: the file cannot be opened or unpacked any further.
    """
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    yield _passage(number, line)
                except InputError as error:
                    yield BadLine(number, error)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"It cannot be read: {error}.", code="unreadable_file") from error


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _passage(number: int, line: bytes) -> GivenPassage:
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
