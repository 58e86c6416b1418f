"""Files as streams of bytes: gzip is known by its first bytes, and lines have a bounded length, so that memory has one too."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_CHUNK = 2**16

#: A line longer than this is skipped unread: hundreds of lines are in memory together. It is more than any passage, and a
#: question of `MAX_QUESTION_CHARS` fits with room to spare, even if every character is written as a JSON escape of 12 bytes.
MAX_LINE_BYTES = 2 * 2**20


def is_gzip(stream: BufferedReader) -> bool:
    """Whether what comes is gzip, whatever the file is called; nothing is read."""
    return stream.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)] == _GZIP_MAGIC


def bounded_lines(stream: BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers, from 1, without line ends and byte order mark; None for one over `MAX_LINE_BYTES`."""
    number = 0
    limit = MAX_LINE_BYTES + len(b"\r\n")
    while line := stream.readline(limit):
        number += 1
        if len(line) == limit and not line.endswith(b"\n"):
            while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        if number == 1:
            line = line.removeprefix(_UTF8_BOM)
        line = line.rstrip(b"\r\n")
        yield number, line if len(line) <= MAX_LINE_BYTES else None
