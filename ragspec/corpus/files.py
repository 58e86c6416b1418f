"""Finds the files to ingest under what a user named: files, folders, globs."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragspec.errors import InputError, RagspecError

#: What can be read, by the end of its name.
FORMATS = (".txt", ".md", ".html", ".htm", ".pdf", ".docx", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to ingest.

    Attributes:
        path: absolute; links are not resolved, so that a link inside a folder belongs to that folder.
        document: its name for a reader: relative to the parent of the folder that was named.
        size: bytes.
    """

    path: Path
    document: str
    size: int

    @property
    def is_jsonl(self) -> bool:
        """Whether it holds passages instead of one document."""
        return self.path.name.lower().endswith((".jsonl", ".jsonl.gz"))

    @property
    def source(self) -> str:
        """What identifies it in a collection: its path, with what is not UTF-8 spelled out."""
        return source_name(self.path)


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that could not be ingested.

    Attributes:
        path: the file or folder.
        line: of a JSONL file, from 1; 0: the whole file.
        code: as in `RagspecError.error_code`.
        reason: a sentence.
    """

    path: str
    line: int
    code: str
    reason: str


def failure(path: Path | str, error: RagspecError, line: int = 0) -> Failure:
    """An error as a row of the report."""
    return Failure(_printable(str(path)), line, error.error_code, str(error))


@dataclass(frozen=True, slots=True)
class Found:
    """What lies under the named paths.

    Attributes:
        files: each once, in a stable order.
        failures: named paths that do not exist or are of no known format, folders that cannot be read.
        unknown: files inside folders that were passed over, for no known format.
    """

    files: list[SourceFile] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    unknown: int = 0


def find_files(paths: Sequence[str]) -> Found:
    """Expand globs and walk folders; hidden files and folders are passed over, loops of links are not followed.

    Args:
        paths: files, folders, or glob patterns (`**` crosses folders).
    """
    files: dict[Path, SourceFile] = {}
    failures: list[Failure] = []
    unknown = 0
    for named in (match for path in paths for match in _expand(path)):
        root = absolute(named)
        if not root.exists():
            error = InputError("There is no such file or folder.", code="no_such_file")
            failures.append(failure(named, error))
        elif root.is_dir():
            for path in _walk(root, failures):
                if not _known(path):
                    unknown += 1
                elif path.is_file():
                    document = _printable(path.relative_to(root.parent).as_posix())
                    files.setdefault(path, SourceFile(path, document, path.stat().st_size))
                else:  # reading a pipe would wait for ever
                    error = InputError("It is a broken link or no regular file.", code="unreadable_file")
                    failures.append(failure(path, error))
        elif _known(root) and root.is_file():
            files.setdefault(root, SourceFile(root, _printable(root.name), root.stat().st_size))
        else:
            error = InputError(f"Its format is not known; known are {', '.join(FORMATS)}.", code="unsupported_format")
            failures.append(failure(named, error))
    return Found(sorted(files.values(), key=lambda file: file.path), failures, unknown)


def is_pattern(path: str) -> bool:
    """Whether a named path is a glob pattern, and not a file that happens to have a `*` in its name."""
    return glob.has_magic(path) and not Path(path).exists()


def absolute(path: Path | str) -> Path:
    """A named path from the root, without `..`; links are kept, which `resolve` would follow."""
    return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100


def source_name(path: Path | str) -> str:
    """A path as it identifies a document in a collection: absolute, with what is not UTF-8 spelled out."""
    return _printable(str(absolute(path)))


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _expand(path: str) -> list[str]:
    if not is_pattern(path):
        return [path]
    return sorted(glob.glob(os.path.expanduser(path), recursive=True)) or [path]  # noqa: PTH111, PTH207 - keeps `**` and absolute patterns


def _walk(root: Path, failures: list[Failure]) -> Iterator[Path]:
    """Files under `root`, links to folders followed unless they lead back into a folder that leads to them."""

    def report(error: OSError) -> None:
        failures.append(failure(error.filename, InputError(f"{error.strerror}.", code="unreadable_file")))

    for folder, folders, files in os.walk(root, followlinks=True, onerror=report):
        here = Path(folder)
        above = {here.resolve(), *here.resolve().parents}
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not ((here / name).is_symlink() and (here / name).resolve() in above)
        )
        yield from (here / name for name in sorted(files) if not name.startswith("."))


def _known(path: Path) -> bool:
    return path.name.lower().endswith(FORMATS)
