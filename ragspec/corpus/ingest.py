"""Brings a collection up to date with files: new documents in, changed ones replaced, unchanged ones left alone."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from chromadb.api.models.Collection import Collection

from ragspec.corpus.chunks import split_text
from ragspec.corpus.embedder import Embedder
from ragspec.corpus.files import Failure, SourceFile, failure, find_files, is_pattern, source_name
from ragspec.corpus.jsonl import BadLine, GivenPassage, read_passages
from ragspec.corpus.parse import parse_document
from ragspec.corpus.store import PAGE, Store, reported, walk
from ragspec.corpus.writer import NewPassage, Writer, version_of
from ragspec.errors import InputError, NotFoundError
from ragspec.settings import Settings

#: Part of every document's version: raise it where the parsers or the splitter come to give other passages.
_FORMAT = 1
#: Failures kept of one file.
SHOWN_FAILURES = 10


@dataclass(slots=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        added, replaced, unchanged, removed: documents; each passage of a JSONL file is one.
        written: passages embedded and written.
        unknown: files inside folders that were passed over, for no known format.
        failed: files and lines that could not be read.
        failures: why; of each file the first `SHOWN_FAILURES`, so that a wrong file of a million lines stays one page.
    """

    added: int = 0
    replaced: int = 0
    unchanged: int = 0
    removed: int = 0
    written: int = 0
    unknown: int = 0
    failed: int = 0
    failures: list[Failure] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """Called while an ingest runs.

    Attributes:
        begin: gets the number of bytes to read.
        read: gets the number of bytes that have been read since the last call.
        written: gets the number of passages of each batch, when it has been written.
    """

    begin: Callable[[int], None] = lambda _: None
    read: Callable[[int], None] = lambda _: None
    written: Callable[[int], None] = lambda _: None


def ingest(
    settings: Settings,
    store: Store,
    embedder: Embedder,
    paths: Sequence[str],
    name: str,
    *,
    prune: bool = False,
    progress: Progress | None = None,
) -> IngestReport:
    """Read `paths` into collection `name`, which is made where there is none.

    A file that cannot be read is reported and the rest go on. Killed at any point, the next run completes the work.

    Args:
        settings: `chunk_tokens` and `chunk_overlap`.
        store: where the collection lies.
        embedder: must be the one the collection was built with.
        paths: files, folders, glob patterns.
        name: the collection.
        prune: delete what the collection has from under `paths` and that is there no longer. What could not be read
            is kept.
        progress: told how far it is.

    Raises:
        InputError: codes `bad_collection_name`, `embedder_mismatch`, `nothing_to_ingest`, and `prune_needs_paths` for
            a glob pattern with `prune`: whether a file that is gone had matched it cannot be told.
        ServiceUnavailableError: Chroma does not answer.
    """
    patterns = [path for path in paths if is_pattern(path)]
    if prune and patterns:
        raise InputError(
            f"--prune cannot be told what is gone from {patterns[0]!r}.", "Name its folder.", code="prune_needs_paths"
        )
    existed = _exists(store, name)
    found = find_files(paths)
    if not found.files and not found.failures and not (prune and existed):
        raise InputError("There is nothing to ingest under the given paths.", code="nothing_to_ingest")
    if not found.files and not existed:
        return IngestReport(unknown=found.unknown, failed=len(found.failures), failures=found.failures)
    collection = store.create(name, embedder.name, embedder.dimension)
    run = _Run(settings, collection, embedder, store.max_batch(), progress or Progress())
    run.report.unknown = found.unknown
    run.report.failed = len(found.failures)
    run.report.failures += found.failures
    run.read(found.files)
    if not existed and not collection.count():
        store.delete(name)  # nothing could be read: leave nothing behind
    elif prune:
        run.prune([source_name(path) for path in paths])
    return run.report


def _exists(store: Store, name: str) -> bool:
    try:
        store.open(name)
    except NotFoundError:
        return False
    return True


class _Run:
    """One ingest."""

    def __init__(
        self, settings: Settings, collection: Collection, embedder: Embedder, max_batch: int, progress: Progress
    ) -> None:
        self.report = IngestReport()
        self._collection = collection
        self._embedder = embedder
        self._progress = progress
        self._size = min(settings.chunk_tokens, embedder.max_tokens)
        self._overlap = min(settings.chunk_overlap, self._size - 1)
        self._writer = Writer(collection, embedder, max_batch, self._count)
        self._failures: Counter[str] = Counter()
        self._seen: set[str] = set()  # sources read, or failed
        self._given: dict[str, str] = {}  # id of a JSONL passage -> where it stands

    def read(self, files: Sequence[SourceFile]) -> None:
        self._progress.begin(sum(file.size for file in files))
        for file in files:
            self._seen.add(file.source)
            try:
                if file.is_jsonl:
                    self._read_passages(file)
                else:
                    self._read_document(file)
                    self._progress.read(file.size)
            except InputError as error:
                self._failed(file, error)
        self._writer.flush()

    def prune(self, roots: Sequence[str]) -> None:
        """Delete what comes from under `roots` and was not met; whatever lies under a failure is kept."""
        failed = [source_name(kept.path) for kept in self.report.failures]
        gone: list[str] = []
        documents: set[str] = set()
        for ids, stored in walk(self._collection):
            for id_, of in zip(ids, stored, strict=True):
                source = str(of.get("source", ""))
                met = id_ in self._given if of.get("given") else source in self._seen
                if met or not _under(source, roots) or _under(source, failed):
                    continue
                gone.append(id_)
                documents.add(id_ if of.get("given") else source)
        self._writer.delete(gone)
        self.report.removed += len(documents)

    def _count(self, passages: int) -> None:
        self.report.written += passages
        self._progress.written(passages)

    def _read_document(self, file: SourceFile) -> None:
        try:
            content = file.path.read_bytes()
        except OSError as error:
            raise InputError(f"It cannot be read: {error.strerror}.", code="unreadable_file") from error
        version = version_of(_FORMAT, self._size, self._overlap, hashlib.sha256(content).hexdigest())
        before = self._stored({"source": file.source})
        if before and all(of == (version, len(before)) for of in before.values()):
            self.report.unchanged += 1
            return
        document = parse_document(content, file.path.suffix.lower())
        spans = split_text(document.text, self._embedder.token_spans, self._size, self._overlap)
        prefix = hashlib.sha256(file.source.encode()).hexdigest()[:16]
        passages = [
            NewPassage(
                id=f"{prefix}-{number:05}",
                text=document.text[start:end],
                stored={
                    "source": file.source,
                    "document": file.document,
                    "title": document.title,
                    "version": version,
                    "chunks": len(spans),
                    "start": start,
                    "end": end,
                },
            )
            for number, (start, end) in enumerate(spans)
        ]
        self._writer.replace(passages, sorted(before.keys() - {passage.id for passage in passages}))
        self._changed(known=bool(before))

    def _read_passages(self, file: SourceFile) -> None:
        rows = read_passages(file.path)
        left = file.size
        while batch := list(itertools.islice(rows, PAGE)):
            fresh = [row for row in batch if isinstance(row, GivenPassage) and self._is_new(file, row)]
            for row in batch:
                if isinstance(row, BadLine):
                    self._failed(file, row.error, row.line)
            before = self._stored(ids=[row.id for row in fresh])
            for passage in (_given_passage(file, row) for row in fresh):
                if before.get(passage.id) == (passage.stored["version"], 1):
                    self.report.unchanged += 1
                    continue
                self._writer.replace([passage])
                self._changed(known=passage.id in before)
            read = min(left, sum(len(row.text) for row in fresh))  # near enough for a bar
            left -= read
            self._progress.read(read)
        self._progress.read(left)

    def _is_new(self, file: SourceFile, row: GivenPassage) -> bool:
        place = f"line {row.line} of {file.document}"
        first = self._given.setdefault(row.id, place)
        if first != place:
            error = InputError(f"The id {row.id!r} stands on {first} already.", code="duplicate_id")
            self._failed(file, error, row.line)
        return first == place

    def _failed(self, file: SourceFile, error: InputError, line: int = 0) -> None:
        self.report.failed += 1
        self._failures[file.source] += 1
        if self._failures[file.source] <= SHOWN_FAILURES:
            self.report.failures.append(failure(file.path, error, line))

    def _changed(self, *, known: bool) -> None:
        if known:
            self.report.replaced += 1
        else:
            self.report.added += 1

    @reported
    def _stored(self, where: dict[str, Any] | None = None, ids: list[str] | None = None) -> dict[str, tuple[str, int]]:
        """Id -> version and number of chunks, of what the collection has of a document or of the given ids."""
        if ids == []:
            return {}
        found = self._collection.get(ids=ids, where=where, include=["metadatas"])
        rows = zip(found["ids"], found["metadatas"] or [], strict=True)
        return {id_: (str(of.get("version", "")), cast("int", of.get("chunks", 0))) for id_, of in rows}


def _given_passage(file: SourceFile, row: GivenPassage) -> NewPassage:
    metadata = json.dumps(row.metadata, ensure_ascii=False)
    return NewPassage(
        id=row.id,
        text=row.text,
        stored={
            "source": file.source,
            "document": row.id,
            "title": row.title,
            "version": version_of(_FORMAT, file.source, row.text, row.title, metadata),
            "chunks": 1,
            "given": 1,
            "metadata": metadata,
        },
    )


def _under(source: str, roots: Sequence[str]) -> bool:
    return any(source == root or source.startswith(root.rstrip("/") + "/") for root in roots)
