"""A passage, and what finds passages for questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved piece of a document.

    Attributes:
        id: the passage's id in its collection.
        text: its text, as it goes into the prompt.
        score: cosine similarity to the question, in [-1, 1]; a foreign retriever's own, or 0.0.
        document: the source's name: a path relative to what was ingested, or a JSONL passage's own id.
        title: a heading for the reader, or empty.
        metadata: what the source said of it (JSON values).
    """

    id: str
    text: str
    score: float
    document: str
    title: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


class Retriever(Protocol):
    """Finds passages for a batch of questions; implementations are safe to call from several threads."""

    def retrieve(self, questions: Sequence[str], collection: str, top_k: int) -> list[list[Passage]]:
        """The best `top_k` passages for each question, best first; fewer (or none) where there are fewer.

        Raises:
            NotFoundError: the collection does not exist.
            ServiceUnavailableError: the store does not answer; the same search may succeed later.
            RefusedError: the store refuses, perhaps one of the questions.
        """
        ...
