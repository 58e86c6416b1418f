"""Any LangChain retriever can stand in for Chroma."""

from __future__ import annotations

import sys
from types import ModuleType

import httpx
import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from ragspec.corpus.foreign import load_foreign_retriever
from ragspec.errors import RagspecError, RefusedError, ServiceUnavailableError, SettingsError


class HTTPError(OSError):
    """As that of `requests`: an OSError that has the response."""

    def __init__(self, status: int) -> None:
        super().__init__("index is gone")
        self.response = httpx.Response(status)


class Echo(BaseRetriever):
    """Answers with the question itself, then with a document that has a name and a score."""

    def _get_relevant_documents(self, query: str) -> list[Document]:
        match query:
            case "boom":
                raise RuntimeError("index is gone")
            case "reset":
                raise ConnectionResetError("index is gone")
            case "slow":
                raise httpx.ReadTimeout("index is gone")
            case "wrapped":
                raise RuntimeError("index is gone") from TimeoutError()
            case "too long" | "overloaded" | "too fast":
                raise HTTPError({"too long": 413, "overloaded": 503, "too fast": 429}[query])
        named = Document(id="d7", page_content="x", metadata={"score": 0.5, "source": "s.md", "title": "T", "set": {1}})
        return [Document(page_content=query), named, Document(page_content="third")]


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("somewhere")
    module.instance, module.Class, module.make, module.number = Echo(), Echo, Echo, 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somewhere", module)


@pytest.mark.parametrize("attribute", ["instance", "Class", "make"])
def test_documents_become_passages(attribute: str) -> None:
    retriever = load_foreign_retriever(f"somewhere:{attribute}")

    first, second = retriever.retrieve(["one", "two"], "unused", 2)

    assert [passage.text for passage in first] == ["one", "x"]
    assert [passage.text for passage in second] == ["two", "x"]
    named = first[1]
    assert (named.id, named.score, named.document, named.title) == ("d7", 0.5, "s.md", "T")
    assert named.metadata["set"] == "{1}"


def test_a_document_without_an_id_gets_a_stable_one() -> None:
    retriever = load_foreign_retriever("somewhere:instance")

    assert retriever.retrieve(["one"], "", 1)[0][0].id == retriever.retrieve(["one"], "", 1)[0][0].id != ""


@pytest.mark.parametrize("name", ["somewhere", "nowhere_at_all:x", "somewhere:absent", "somewhere:number"])
def test_a_wrong_import_path_names_the_setting(name: str) -> None:
    with pytest.raises(SettingsError, match=f"RAGSPEC_RETRIEVER={name}"):
        load_foreign_retriever(name)


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("boom", RefusedError),
        ("reset", ServiceUnavailableError),
        ("slow", ServiceUnavailableError),
        ("wrapped", ServiceUnavailableError),
        ("too long", RefusedError),
        ("overloaded", ServiceUnavailableError),
        ("too fast", ServiceUnavailableError),
    ],
)
def test_a_failing_retriever_has_a_code_and_says_whether_to_ask_again(question: str, kind: type[RagspecError]) -> None:
    with pytest.raises(kind, match="index is gone") as caught:
        load_foreign_retriever("somewhere:instance").retrieve([question], "", 1)

    assert caught.value.error_code == "retriever_failed"
