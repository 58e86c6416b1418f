"""ragspec's retriever as a LangChain `BaseRetriever` (extra `langchain`)."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from ragspec.corpus.embedder import load_embedder
from ragspec.corpus.retriever import load_retriever
from ragspec.settings import Settings, load_settings


class RagspecRetriever(BaseRetriever):
    """Passages of one collection, for any LangChain chain.

    Attributes:
        retriever: what satisfies `ragspec.corpus.passage.Retriever`.
        collection: where to look.
        top_k: how many passages a question gets.
    """

    retriever: Any
    collection: str
    top_k: int = 3

    @classmethod
    def from_settings(cls, collection: str, top_k: int = 3, settings: Settings | None = None) -> RagspecRetriever:
        """Load the embedder and connect to the store of the settings (default: the environment's)."""
        settings = settings or load_settings()
        return cls(retriever=load_retriever(settings, load_embedder(settings)), collection=collection, top_k=top_k)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        del run_manager
        (passages,) = self.retriever.retrieve([query], self.collection, self.top_k)
        return [
            Document(
                id=passage.id,
                page_content=passage.text,
                metadata={
                    **passage.metadata,
                    "source": passage.document,
                    "title": passage.title,
                    "score": passage.score,
                },
            )
            for passage in passages
        ]
