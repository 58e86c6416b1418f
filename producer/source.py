"""The bytes of a question file: opened and unzipped."""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from ragspec.errors import InputError, NotFoundError
from ragspec.streams import is_gzip

#: No UTF-8 file begins so.
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class Source:
    """An open question file.

    Attributes:
        name: what the user called it, without `.gz`; `-` for standard input.
        stream: its bytes, unzipped; `peek` shows what comes.
    """

    name: str
    stream: BufferedReader


@contextmanager
def open_source(path: str) -> Iterator[Source]:
    """Open a file, or standard input for `-`, and unzip it if its first bytes are gzip's.

    Raises:
        NotFoundError: there is no such file (`unknown_file`).
        InputError: it is a folder or may not be read (`unreadable_file`), it is UTF-16 (`not_utf8`), or the gzip
            stream breaks off or is damaged (`corrupt_gzip`), also while the caller reads.
    """
    with ExitStack() as stack:
        raw = sys.stdin.buffer if path == "-" else stack.enter_context(_open(path))
        # Typed as what it is: standard input is buffered too.
        stream = cast("BufferedReader", raw)
        zipped = is_gzip(stream)
        if zipped:
            unzipped = stack.enter_context(gzip.GzipFile(fileobj=stream))
            stream = stack.enter_context(BufferedReader(unzipped))
        try:
            # Read as UTF-8 its lines would have a fault each, and not the one that helps.
            if stream.peek(2)[:2] in _UTF16_BOMS:
                raise InputError(f"{path} is UTF-16.", "Save the file as UTF-8.", code="not_utf8")
            yield Source(path.removesuffix(".gz") if zipped else path, stream)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(
                f"{path} is a damaged gzip file: {error}.", "Write it again.", code="corrupt_gzip"
            ) from error


@contextmanager
def seekable(source: Source) -> Iterator[IO[bytes]]:
    """The source as a file one can seek in: itself, or a copy on disk if it comes zipped or through a pipe."""
    if source.stream.seekable() and not isinstance(source.stream.raw, gzip.GzipFile):
        yield source.stream
        return
    with tempfile.TemporaryFile(prefix="ragspec-") as copy:
        shutil.copyfileobj(source.stream, copy, _CHUNK)
        copy.seek(0)
        yield copy


def _open(path: str) -> IO[bytes]:
    try:
        return Path(path).open("rb")
    except FileNotFoundError:
        raise NotFoundError(f"There is no file {path}.", code="unknown_file") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.", code="unreadable_file") from error
