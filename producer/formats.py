"""Which format a question file is in."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, get_args

from producer.source import Source
from ragspec.errors import InputError

Format = Literal["jsonl", "csv", "tsv", "parquet", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)
_BY_SUFFIX: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
}
_BOM_AND_SPACE = b"\xef\xbb\xbf \t\r\n"


def detect(source: Source) -> Format:
    """The format, by the file's name or else by its first bytes, which only JSON Lines and Parquet give away.

    Raises:
        InputError: neither tells (`unknown_format`; `not_gzip` where the name says gzip and the bytes do not), or there are no
            bytes (`empty_file`).
    """
    first = source.stream.peek(64)
    if not first:
        raise InputError(f"{_called(source)} is empty.", "Write one question a line.", code="empty_file")
    known = _BY_SUFFIX.get(PurePath(source.name).suffix.lower())
    if known:
        return known
    if first.startswith(b"PAR1"):
        return "parquet"
    if first.lstrip(_BOM_AND_SPACE).startswith(b"{"):
        return "jsonl"
    if source.name.lower().endswith(".gz"):  # `open_source` takes the ending from what is gzip
        raise InputError(
            f"{source.name} is not gzip, though its name ends with .gz.",
            f"Rename it, or name its format: --format {'|'.join(FORMATS)}.",
            code="not_gzip",
        )
    raise InputError(
        f"The format of {_called(source)} cannot be told from its name.",
        f"Name it: --format {'|'.join(FORMATS)}.",
        code="unknown_format",
    )


def _called(source: Source) -> str:
    return "Standard input" if source.name == "-" else source.name
