"""Embeds passages in batches and puts them into a collection, document by document and safe against a crash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chromadb.api.models.Collection import Collection

from ragspec.corpus.embedder import Embedder
from ragspec.corpus.store import reported

#: Passages embedded at a time: many enough to sort by length into full batches, few enough to see progress.
EMBEDDED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class NewPassage:
    """A passage to be written.

    Attributes:
        id: in the collection.
        text: as it will go into prompts.
        stored: Chroma's metadata of it: `source`, `document`, `title`, `version`, `chunks`, and `metadata` as JSON.
    """

    id: str
    text: str
    stored: dict[str, str | int]


def version_of(*parts: Any) -> str:
    """16 hex digits that change where any of the parts does."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class Writer:
    """Buffers passages and writes them in batches.

    A document's new passages are written before its old ones are deleted. After a crash between the two, its passages
    carry two versions, and the next run writes it again.
    """

    def __init__(
        self, collection: Collection, embedder: Embedder, max_batch: int, written: Callable[[int], None]
    ) -> None:
        """Write into `collection`, at most `max_batch` passages an upsert; `written` is told of each batch's size."""
        self._collection = collection
        self._embedder = embedder
        self._max_batch = max_batch
        self._written = written
        self._passages: list[NewPassage] = []
        self._stale: list[str] = []

    def replace(self, passages: Sequence[NewPassage], stale: Sequence[str] = ()) -> None:
        """Write a document's passages, then delete those of `stale`: the ids that it no longer has."""
        self._passages += passages
        self._stale += stale
        if len(self._passages) >= EMBEDDED_AT_ONCE:
            self.flush()

    @reported
    def flush(self) -> None:
        """Write what is buffered."""
        step = min(EMBEDDED_AT_ONCE, self._max_batch)
        for start in range(0, len(self._passages), step):
            batch = self._passages[start : start + step]
            texts = [passage.text for passage in batch]
            self._collection.upsert(
                ids=[passage.id for passage in batch],
                embeddings=self._embedder.embed(texts, "passage"),
                documents=texts,
                metadatas=[passage.stored for passage in batch],
            )
            self._written(len(batch))
        self._passages.clear()
        self.delete(self._stale)
        self._stale.clear()

    @reported
    def delete(self, ids: Sequence[str]) -> None:
        """Delete passages."""
        for start in range(0, len(ids), self._max_batch):
            self._collection.delete(ids=list(ids[start : start + self._max_batch]))
