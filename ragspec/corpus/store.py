"""Collections of passages in a Chroma server. This file imports no torch: a producer checks collections with it."""

from __future__ import annotations

import base64
import difflib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

import chromadb
import chromadb.errors
import httpx
from chromadb.api.client import Client
from chromadb.api.models.Collection import Collection
from chromadb.config import Settings as ChromaSettings

from ragspec.corpus.naming import NAME_RULE, check_name
from ragspec.errors import InputError, NotFoundError, RefusedError, ServiceUnavailableError
from ragspec.models import model_label
from ragspec.settings import PREFIX, Settings

#: Keys of a collection's own metadata.
EMBEDDER_KEY = "ragspec_embedder"
DIMENSION_KEY = "ragspec_dimension"
#: Seconds that a call to Chroma may take: a large upsert does take some.
_TIMEOUT = httpx.Timeout(120, connect=5)
#: Passages read at a time where a whole collection is walked.
PAGE = 1000

#: What Chroma's client raises where the same call may succeed a moment later.
AWAY = (httpx.TransportError, chromadb.errors.RateLimitError)

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """What is known of a collection without reading its passages.

    Attributes:
        name: its name.
        passages: how many it holds.
        embedder: identity (`name@fingerprint`) of the embedder it was built with; empty: not built by ragspec.
        dimension: length of its vectors; 0 where unknown.
        space: how vectors are compared; ragspec builds `cosine`.
    """

    name: str
    passages: int
    embedder: str
    dimension: int
    space: str


def reported(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turns what Chroma's client raises when the server is away or broken into an error a user can act on."""

    @functools.wraps(call)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except AWAY as error:
            raise ServiceUnavailableError(
                f"Chroma does not answer: {str(error) or type(error).__name__}.",
                f"Is it running? `ragspec up` starts one; {PREFIX}CHROMA_URL names another.",
            ) from error
        except chromadb.errors.NotFoundError as error:
            raise NotFoundError(f"The collection is gone: {error}", code="unknown_collection") from error
        except (httpx.HTTPError, chromadb.errors.ChromaError) as error:
            raise RefusedError(f"Chroma refuses: {error}.", "Its own log may say more.") from error

    return wrapper


class Store:
    """A Chroma server's collections; safe to use from several threads.

    `close`, the end of a `with` block, or nobody holding it any more gives its connections back.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        # Chroma 1.5.9 neither closes its own HTTP session nor gives it a time limit, and offers no other way to.
        session: httpx.Client = client._server._session  # type: ignore[attr-defined]  # noqa: SLF001
        session.timeout = _TIMEOUT
        self.close = weakref.finalize(self, session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @reported
    def max_batch(self) -> int:
        """Passages that one upsert may carry."""
        return int(self._client.get_max_batch_size())

    @reported
    def names(self) -> list[str]:
        """The names of all collections, sorted."""
        found: list[str] = []
        while page := self._client.list_collections(limit=PAGE, offset=len(found)):
            found += [collection.name for collection in page]
        return sorted(found)

    @reported
    def open(self, name: str) -> Collection:
        """Chroma's own handle of a collection.

        Raises:
            InputError: code `bad_collection_name`.
            NotFoundError: code `unknown_collection`; the message names those that exist.
        """
        check_name(name)
        try:
            return self._client.get_collection(name, embedding_function=None)
        except chromadb.errors.NotFoundError:
            raise self._unknown(name) from None

    @reported
    def create(self, name: str, embedder: str, dimension: int) -> Collection:
        """Open a collection, made empty where there is none; the embedder is checked by `require_embedder`.

        Raises:
            InputError: codes `bad_collection_name` and `embedder_mismatch`.
        """
        check_name(name)
        try:
            collection = self._client.get_or_create_collection(
                name,
                metadata={EMBEDDER_KEY: embedder, DIMENSION_KEY: dimension},
                configuration={"hnsw": {"space": "cosine"}},
                embedding_function=None,
            )
        except chromadb.errors.InvalidArgumentError as error:
            raise InputError(
                f"Chroma refuses the name {name!r}: {error}", NAME_RULE, code="bad_collection_name"
            ) from None
        require_embedder(name, embedder_of(collection), embedder)
        return collection

    @reported
    def describe(self, name: str) -> CollectionInfo:
        """Count and describe a collection; raises as `open` does."""
        collection = self.open(name)
        metadata = collection.metadata or {}
        space = (collection.configuration_json.get("hnsw") or {}).get("space", "")
        return CollectionInfo(
            name=name,
            passages=collection.count(),
            embedder=embedder_of(collection),
            dimension=int(metadata.get(DIMENSION_KEY, 0)),
            space=str(space),
        )

    def count_documents(self, name: str) -> int:
        """Count the documents that its passages come from; reads all passages' metadata, page by page."""
        documents: set[str] = set()
        for ids, stored in walk(self.open(name)):
            documents |= {
                id_ if of.get("given") else str(of.get("source", id_)) for id_, of in zip(ids, stored, strict=True)
            }
        return len(documents)

    @reported
    def delete(self, name: str) -> None:
        """Delete a collection and all it holds; raises as `open` does."""
        self.open(name)
        self._client.delete_collection(name)

    def _unknown(self, name: str) -> NotFoundError:
        known = self.names()
        near = difflib.get_close_matches(name, known, n=1)
        advice = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"There are: {', '.join(known[:20])}."
            if known
            else "There is none yet: `ragspec ingest PATH --collection NAME` makes one."
        )
        return NotFoundError(f"There is no collection {name!r}.", advice, code="unknown_collection")


def embedder_of(collection: Collection) -> str:
    """Identity of the embedder a collection was built with; empty where it was not built by ragspec."""
    return str((collection.metadata or {}).get(EMBEDDER_KEY, ""))


def walk(collection: Collection) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
    """All passages' ids and metadata, a page at a time; nothing may be added or deleted meanwhile."""
    offset = 0
    while (page := _page(collection, offset))[0]:
        yield page
        offset += len(page[0])


def texts(collection: Collection) -> Iterator[str]:
    """All passages' texts, a page at a time; nothing may be added or deleted meanwhile."""
    offset = 0
    while page := _texts(collection, offset):
        yield from page
        offset += len(page)


@reported
def _texts(collection: Collection, offset: int) -> list[str]:
    return collection.get(limit=PAGE, offset=offset, include=["documents"])["documents"] or []


@reported
def _page(collection: Collection, offset: int) -> tuple[list[str], list[dict[str, Any]]]:
    page = collection.get(limit=PAGE, offset=offset, include=["metadatas"])
    return page["ids"], [dict(metadata or {}) for metadata in page["metadatas"] or []]


def require_embedder(name: str, built: str, embedder: str) -> None:
    """Refuse to mix vectors of two embedders.

    Args:
        name: the collection's.
        built: identity of the embedder it was built with; empty: not built by ragspec.
        embedder: identity `name@fingerprint`, or a bare name where the fingerprint is not known.

    Raises:
        InputError: code `embedder_mismatch`, naming both.
    """
    same = built == embedder if "@" in embedder else built.rpartition("@")[0] == embedder
    if same:
        return
    how = f"was built with the embedder {built}" if built else "was not built by ragspec"
    advice = (
        f"Set {PREFIX}EMBEDDER to the one it was built with, or ingest into a new collection."
        if built
        else "Ingest its documents into a new collection."
    )
    raise InputError(f"Collection {name!r} {how}, and the setting says {embedder}.", advice, code="embedder_mismatch")


def open_store(settings: Settings) -> Store:
    """Connect to the Chroma server of the settings.

    Raises:
        ServiceUnavailableError: none is configured or running, or it does not answer.
    """
    url = urlsplit(settings.require_chroma())
    secure = url.scheme == "https"
    headers = {}
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    try:
        client = chromadb.HttpClient(
            host=str(url.hostname),
            port=url.port or (443 if secure else 80),
            ssl=secure,
            headers=headers,
            settings=ChromaSettings(anonymized_telemetry=False),
        )
    except (ValueError, httpx.HTTPError, chromadb.errors.ChromaError) as error:
        address = f"{url.scheme}://{url.hostname}" + (f":{url.port}" if url.port else "")
        raise ServiceUnavailableError(
            f"Chroma does not answer at {address}: {error}",
            f"Is it running? `ragspec up` starts one; {PREFIX}CHROMA_URL names another.",
        ) from error
    return Store(cast("Client", client))  # declared as its base class, which cannot be closed


def check_collection(settings: Settings, name: str) -> CollectionInfo | None:
    """Make sure that questions can be answered from a collection, before any is enqueued. Loads no model.

    Returns:
        What the collection is; None where a foreign retriever is set, which alone knows its collections.

    Raises:
        InputError: codes `bad_collection_name`, `empty_collection`, `embedder_mismatch` (by the embedder's name: its
            fingerprint is compared where it is loaded).
        NotFoundError: code `unknown_collection`.
        ServiceUnavailableError: Chroma does not answer.
    """
    if settings.retriever:
        return None
    check_name(name)
    with open_store(settings) as store:
        info = store.describe(name)
    if not info.passages:
        raise InputError(
            f"Collection {name!r} is empty.", f"`ragspec ingest PATH --collection {name}`.", code="empty_collection"
        )
    require_embedder(name, info.embedder, model_label(settings.embedder))
    return info
