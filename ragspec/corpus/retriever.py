"""Finds the passages for a batch of questions: in Chroma, or by a LangChain retriever that the settings name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import chromadb.errors
import httpx
from chromadb.api.models.Collection import Collection

from ragspec.corpus.embedder import Embedder
from ragspec.corpus.passage import Passage, Retriever
from ragspec.corpus.store import AWAY, Store, embedder_of, open_store, require_embedder
from ragspec.errors import RefusedError, ServiceUnavailableError
from ragspec.settings import Settings


def load_retriever(settings: Settings, embedder: Embedder) -> Retriever:
    """The retriever of the settings.

    Raises:
        SettingsError: RAGSPEC_RETRIEVER names nothing that retrieves.
        ServiceUnavailableError: Chroma does not answer.
    """
    if settings.retriever:
        from ragspec.corpus.foreign import load_foreign_retriever

        return load_foreign_retriever(settings.retriever)
    return ChromaRetriever(open_store(settings), embedder)


class ChromaRetriever:
    """Nearest passages by cosine similarity; safe to call from several threads."""

    def __init__(self, store: Store, embedder: Embedder) -> None:
        self._store = store
        self._embedder = embedder
        self._opened: dict[str, Collection] = {}

    def retrieve(self, questions: Sequence[str], collection: str, top_k: int) -> list[list[Passage]]:
        """See `Retriever`; one embedding batch and one call to Chroma. Equal scores are ordered by id.

        Raises:
            InputError: code `embedder_mismatch`: the collection was built with another embedder.
            NotFoundError: code `unknown_collection`.
            RefusedError: Chroma refuses, perhaps one question's vector.
            ServiceUnavailableError: Chroma does not answer.
        """
        if not questions or top_k == 0:
            return [[] for _ in questions]
        vectors = self._embedder.embed(questions)
        try:
            try:
                found = self._query(self._open(collection), vectors, top_k)
            except chromadb.errors.NotFoundError:  # deleted since it was opened, perhaps made anew
                del self._opened[collection]
                found = self._query(self._open(collection), vectors, top_k)
        except AWAY as error:
            raise ServiceUnavailableError(
                f"Chroma does not answer from collection {collection!r}: {str(error) or type(error).__name__}.",
                "Is it running?",
            ) from error
        except (httpx.HTTPError, chromadb.errors.ChromaError) as error:
            raise RefusedError(f"Chroma refuses to search collection {collection!r}: {error}.") from error
        rows = zip(found["ids"], found["documents"], found["metadatas"], found["distances"], strict=True)
        return [sorted(_passages(*row), key=lambda passage: (-passage.score, passage.id)) for row in rows]

    def _open(self, name: str) -> Collection:
        opened = self._opened.get(name)
        if opened is None:
            opened = self._store.open(name)
            require_embedder(name, embedder_of(opened), self._embedder.name)
            self._opened[name] = opened
        return opened

    @staticmethod
    def _query(collection: Collection, vectors: Any, top_k: int) -> Any:
        return collection.query(
            query_embeddings=vectors, n_results=top_k, include=["documents", "metadatas", "distances"]
        )


def _passages(
    ids: Sequence[str],
    texts: Sequence[str | None],
    metadatas: Sequence[dict[str, Any] | None],
    distances: Sequence[float],
) -> list[Passage]:
    return [
        passage_of(id_, text or "", metadata or {}, 1.0 - distance)
        for id_, text, metadata, distance in zip(ids, texts, metadatas, distances, strict=True)
    ]


def passage_of(id_: str, text: str, stored: dict[str, Any], score: float) -> Passage:
    """A passage out of what Chroma holds of it; what its source said is kept as one JSON string there."""
    metadata = json.loads(stored.get("metadata") or "{}")
    metadata |= {key: stored[key] for key in ("start", "end") if key in stored}
    return Passage(
        id=id_,
        text=text,
        score=score,
        document=str(stored.get("document", id_)),
        title=str(stored.get("title", "")),
        metadata=metadata,
    )
