"""Lets any LangChain retriever stand in for Chroma: this is how Pinecone and others plug in."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx

from ragspec.corpus.passage import Passage
from ragspec.errors import RefusedError, ServiceUnavailableError, SettingsError
from ragspec.settings import PREFIX

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever

#: Where vector stores put a document's score, if anywhere.
_SCORE_KEYS = ("score", "relevance_score", "similarity")
#: What a network that fails raises; `OSError` covers ConnectionError, TimeoutError and what `requests` raises.
_AWAY = (OSError, httpx.TransportError)
#: HTTP statuses by which a service, or what stands before it, asks to come again (RFC 9110, RFC 6585). Any other is an answer.
_COME_AGAIN = frozenset({429, 502, 503, 504})


class ForeignRetriever:
    """A LangChain retriever behind our protocol. The collection's name is not used: it knows its own."""

    def __init__(self, name: str, retriever: BaseRetriever) -> None:
        self._name = name
        self._retriever = retriever

    def retrieve(self, questions: Sequence[str], collection: str, top_k: int) -> list[list[Passage]]:
        """See `Retriever`.

        Raises:
            ServiceUnavailableError: what it asks does not answer; code `retriever_failed`, with what it raised.
            RefusedError: it failed in another way; same code.
        """
        del collection
        if not questions or top_k == 0:
            return [[] for _ in questions]
        try:
            found = self._retriever.batch(list(questions))
        except Exception as error:  # whatever a foreign library raises
            kind = ServiceUnavailableError if _is_away(error) else RefusedError
            raise kind(
                f"{PREFIX}RETRIEVER={self._name} failed: {type(error).__name__}: {error}", code="retriever_failed"
            ) from error
        return [[_passage(document) for document in documents[:top_k]] for documents in found]


def load_foreign_retriever(name: str) -> ForeignRetriever:
    """Import `module:attribute`: a LangChain `BaseRetriever`, its class, or what makes one when called.

    Raises:
        SettingsError: names RAGSPEC_RETRIEVER and what is wrong with it.
    """
    setting = f"{PREFIX}RETRIEVER={name}"
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingsError(f"{setting}: must be `module:attribute`.")
    try:
        from langchain_core.retrievers import BaseRetriever
    except ImportError:
        raise SettingsError(f"{setting}: LangChain is not installed.", "Install `ragspec[langchain]`.") from None
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        if callable(found) and not isinstance(found, BaseRetriever):
            found = found()
    except Exception as error:  # a user's module may raise anything
        raise SettingsError(f"{setting}: {type(error).__name__}: {error}.") from error
    if not isinstance(found, BaseRetriever):
        raise SettingsError(f"{setting}: is a {type(found).__name__}, not a LangChain BaseRetriever.")
    return ForeignRetriever(name, found)


def _is_away(error: BaseException) -> bool:
    """Whether a service that did not answer is behind an error, itself or as a cause: libraries like to wrap theirs."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        status = getattr(getattr(cause, "response", None), "status_code", None)  # of `requests` and `httpx`
        if isinstance(status, int):
            return status in _COME_AGAIN
        if isinstance(cause, _AWAY):
            return True
        seen.append(cause)
        cause = cause.__cause__
    return False


def _passage(document: Document) -> Passage:
    text = document.page_content
    id_ = document.id or hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = json.loads(json.dumps(document.metadata, default=str))
    score = next((metadata[key] for key in _SCORE_KEYS if isinstance(metadata.get(key), int | float)), 0.0)
    return Passage(
        id=id_,
        text=text,
        score=float(score),
        document=str(metadata.get("source") or id_),
        title=str(metadata.get("title") or ""),
        metadata=metadata,
    )
