"""Files as streams of bytes: gzip is known by its first bytes, and lines have a bounded length, so that memory has one too."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_CHUNK = 2**16


def is_gzip(stream: BufferedReader) -> bool:
    """Whether what comes is gzip, whatever the file is called; nothing is read."""
    return stream.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)] == _GZIP_MAGIC


def bounded_lines(stream: BufferedReader, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers, from 1, without line ends and byte order mark; None for one over `longest` bytes."""
    number = 0
    limit = longest + len(b"\r\n")
    while line := stream.readline(limit):
        number += 1
        if len(line) == limit and not line.endswith(b"\n"):
            while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(_UTF8_BOM)
        yield number, line.rstrip(b"\r\n")
