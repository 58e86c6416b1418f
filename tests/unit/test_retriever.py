"""What a failing Chroma means for the search at hand; its client is stood in for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chromadb.errors
import httpx
import numpy as np
import pytest

from ragspec.corpus.retriever import ChromaRetriever
from ragspec.corpus.store import EMBEDDER_KEY
from ragspec.errors import RagspecError, RefusedError, ServiceUnavailableError


class Embedder:
    name = "tiny@0123"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return np.ones((len(texts), 2), np.float32)


class Failing:
    """A store whose one collection fails every search."""

    metadata = {EMBEDDER_KEY: Embedder.name}  # noqa: RUF012 - as Chroma's own

    def __init__(self, error: Exception) -> None:
        self._error = error

    def open(self, name: str) -> Failing:
        del name
        return self

    def query(self, **_: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("refused"), ServiceUnavailableError),
        (httpx.ReadTimeout("too slow"), ServiceUnavailableError),
        (chromadb.errors.RateLimitError("too many"), ServiceUnavailableError),
        (chromadb.errors.InvalidArgumentError("bad vector"), RefusedError),
        (chromadb.errors.InternalError("bad index"), RefusedError),
    ],
)
def test_only_a_chroma_that_may_answer_later_counts_as_unavailable(error: Exception, kind: type[RagspecError]) -> None:
    with pytest.raises(kind, match=str(error)):
        ChromaRetriever(Failing(error), Embedder()).retrieve(["why?"], "docs", 3)  # type: ignore[arg-type]
