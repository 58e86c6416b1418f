"""What a model folder holds: a checksum of every file, and one fingerprint of them all."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

MANIFEST = "manifest.json"
#: Files that decide what a model computes; README and pictures do not count. No pickled format is among them.
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file as it was when the folder was written.

    Attributes:
        sha256: of its bytes, hex.
        size: bytes.
        mtime_ns: modification time; while it and the size stand, the checksum is taken as read.
    """

    sha256: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model folder's contents.

    Attributes:
        name: what settings call the model.
        source: where it came from, for a reader.
        fingerprint: see `fingerprint`.
        files: relative POSIX path -> record.
    """

    name: str
    source: str
    fingerprint: str
    files: dict[str, FileRecord]


def write_manifest(folder: Path, name: str, source: str) -> Manifest:
    """Record what `folder` holds now."""
    files = {path.relative_to(folder).as_posix(): _record(path) for path in _model_files(folder)}
    manifest = Manifest(name, source, _combine({file: record.sha256 for file, record in files.items()}), files)
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None where there is none or it cannot be read."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
        files = {file: FileRecord(**record) for file, record in found.pop("files").items()}
        return Manifest(files=files, **found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that has a manifest, or None.

    Files whose size and modification time stand are not read again: checking takes no time on every start.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return "it has no readable manifest" if folder.exists() else "not there"
    for file, record in manifest.files.items():
        try:
            stat = (folder / file).stat()
        except OSError:
            return f"{file} is missing"
        if (stat.st_size, stat.st_mtime_ns) == (record.size, record.mtime_ns):
            continue
        if stat.st_size != record.size or sha256_of(folder / file) != record.sha256:
            return f"{file} differs from its checksum"
    return None


def fingerprint(path: Path) -> str:
    """What tells two models apart: 16 hex digits of a SHA-256 over the names and bytes of all model files.

    A folder with an undamaged manifest answers from it. Any other is read through, once per process: about a second
    for each GB; a hub snapshot's large files are links to a blob named by its own SHA-256, and are not read.
    """
    path = path.resolve()
    manifest = read_manifest(path)
    if manifest is not None and damage(path) is None:
        return manifest.fingerprint
    stats = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in _model_files(path))
    return _fingerprint(path, stats)


@lru_cache(maxsize=16)
def _fingerprint(folder: Path, stats: tuple[tuple[Path, int, int], ...]) -> str:
    return _combine({file.relative_to(folder).as_posix(): _content_id(file) for file, _, _ in stats})


def _combine(checksums: dict[str, str]) -> str:
    lines = "".join(f"{file} {checksum}\n" for file, checksum in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _content_id(file: Path) -> str:
    blob = file.resolve()
    if file.is_symlink() and blob.parent.name == "blobs" and len(blob.name) == hashlib.sha256().digest_size * 2:
        return blob.name
    return sha256_of(file)


def sha256_of(file: Path) -> str:
    """A file's SHA-256, hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _record(file: Path) -> FileRecord:
    stat = file.stat()
    return FileRecord(sha256_of(file), stat.st_size, stat.st_mtime_ns)


def _model_files(folder: Path) -> list[Path]:
    found = {file for pattern in MODEL_FILES for file in folder.rglob(pattern) if file.is_file()}
    return sorted(file for file in found if file != folder / MANIFEST)
