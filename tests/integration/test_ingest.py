"""Files go into a real collection through the real embedder, and stay in step with it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ragspec.cli.corpus import collections, search
from ragspec.cli.corpus import ingest as ingest_command
from ragspec.corpus.embedder import Embedder, load_embedder
from ragspec.corpus.ingest import IngestReport, ingest
from ragspec.corpus.retriever import ChromaRetriever, load_retriever
from ragspec.corpus.store import Store, open_store
from ragspec.corpus.writer import Writer
from ragspec.errors import InputError, NotFoundError
from ragspec.settings import Settings, load_settings

pytestmark = [pytest.mark.services, pytest.mark.model]


@pytest.fixture(scope="module")
def settings(chroma_url: str) -> Settings:
    return load_settings(chroma_url=chroma_url, chunk_tokens=32, chunk_overlap=8)


@pytest.fixture(scope="module")
def embedder(settings: Settings) -> Embedder:
    return load_embedder(settings)


@pytest.fixture(scope="module")
def store(settings: Settings) -> Iterator[Store]:
    with open_store(settings) as store:
        yield store


@pytest.fixture
def name(store: Store) -> Iterator[str]:
    name = f"corpus-{uuid.uuid4().hex}"
    yield name
    if name in store.names():
        store.delete(name)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Three documents, one of several passages."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "leave.md").write_text("# Leave\n\n" + "Everyone has thirty days of paid leave a year. " * 12)
    (docs / "notice.txt").write_text("The notice period is four weeks.")
    (docs / "cats.html").write_text("<title>Cats</title><p>Cats sleep sixteen hours a day.</p>")
    return docs


Run = Callable[..., IngestReport]


@pytest.fixture
def run(settings: Settings, store: Store, embedder: Embedder, name: str) -> Run:
    def run(*paths: Path, prune: bool = False) -> IngestReport:
        return ingest(settings, store, embedder, [str(path) for path in paths], name, prune=prune)

    return run


def sources(store: Store, name: str) -> set[str]:
    return {Path(str(of["source"])).name for of in store.open(name).get(include=["metadatas"])["metadatas"] or []}


def test_passages_are_exact_pieces_of_their_document(run: Run, store: Store, name: str, docs: Path, embedder) -> None:
    report = run(docs)

    assert (report.added, report.failures) == (3, [])
    found = store.open(name).get(where={"document": "docs/leave.md"}, include=["documents", "metadatas"])
    assert report.written == store.describe(name).passages == len(found["ids"]) + 2
    assert len(found["ids"]) > 3
    text = (docs / "leave.md").read_text()
    for passage, of in zip(found["documents"] or [], found["metadatas"] or [], strict=True):
        assert passage == text[int(of["start"]) : int(of["end"])]
        assert embedder.count_tokens(passage) <= 32
        assert of["title"] == "Leave"


def test_ingesting_again_embeds_nothing(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(docs)
    monkeypatch.setattr(Embedder, "embed", lambda *args: pytest.fail("embedded"))

    report = run(docs, docs / "notice.txt")

    assert (report.unchanged, report.added, report.replaced, report.written) == (3, 0, 0, 0)


def test_a_changed_document_is_replaced_whole(run: Run, store: Store, name: str, docs: Path) -> None:
    run(docs)
    (docs / "leave.md").write_text("# Leave\n\nThere is none.")

    report = run(docs)

    assert (report.replaced, report.unchanged) == (1, 2)
    assert store.open(name).get(where={"document": "docs/leave.md"})["documents"] == ["# Leave\n\nThere is none."]


def test_another_chunk_size_replaces(
    run: Run, settings: Settings, store: Store, embedder: Embedder, name: str, docs: Path
) -> None:
    run(docs)
    other = settings.model_copy(update={"chunk_tokens": 64})

    assert ingest(other, store, embedder, [str(docs)], name).replaced == 3


def test_a_run_that_died_between_writing_and_deleting_is_healed(
    run: Run, store: Store, name: str, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(docs)
    (docs / "leave.md").write_text("# Leave\n\nThere is none.")
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "delete", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(docs)
    assert len(store.open(name).get(where={"document": "docs/leave.md"})["ids"]) > 1

    run(docs)

    assert store.open(name).get(where={"document": "docs/leave.md"})["documents"] == ["# Leave\n\nThere is none."]


def test_prune_removes_what_is_gone_from_the_given_paths_only(run: Run, store: Store, name: str, docs: Path) -> None:
    other = docs.parent / "other.txt"
    other.write_text("Elsewhere.")
    run(docs, other)
    (docs / "cats.html").unlink()
    other.unlink()

    assert run(docs).removed == 0
    assert run(docs / ".." / "docs", prune=True).removed == 1
    assert sources(store, name) == {"leave.md", "notice.txt", "other.txt"}


def test_prune_keeps_what_cannot_be_read_now(run: Run, store: Store, name: str, docs: Path) -> None:
    run(docs)
    (docs / "notice.txt").write_bytes(b"\xff\xfe\x00")

    report = run(docs, prune=True)

    assert [failure.code for failure in report.failures] == ["binary_file"]
    assert "notice.txt" in sources(store, name)


def test_prune_refuses_a_pattern(run: Run, docs: Path) -> None:
    with pytest.raises(InputError) as caught:
        run(docs / "*.md", prune=True)

    assert caught.value.error_code == "prune_needs_paths"


def write_rows(file: Path, *rows: dict[str, str]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_jsonl_passages_keep_their_ids_and_follow_their_file(run: Run, store: Store, name: str, tmp_path: Path) -> None:
    rows = [{"id": f"p{n}", "text": f"Passage number {n}."} for n in range(4)]
    file = write_rows(tmp_path / "p.jsonl", *rows)
    assert run(file).added == 4
    write_rows(file, {**rows[0], "text": "Changed."}, *rows[1:3])

    report = run(file, prune=True)

    assert (report.replaced, report.unchanged, report.removed) == (1, 2, 1)
    assert sorted(store.open(name).get()["ids"]) == ["p0", "p1", "p2"]


def test_a_duplicate_id_is_reported_with_both_lines(run: Run, tmp_path: Path) -> None:
    file = write_rows(
        tmp_path / "p.jsonl", {"id": "a", "text": "x"}, {"id": "b", "text": "x"}, {"id": "a", "text": "y"}
    )

    report = run(file)

    (failure,) = report.failures
    assert (report.added, failure.line, failure.code) == (2, 3, "duplicate_id")
    assert "line 1" in failure.reason


def test_a_file_of_bad_lines_stays_a_short_report(run: Run, tmp_path: Path) -> None:
    report = run(write_rows(tmp_path / "p.jsonl", *[{"id": "a"}] * 50))

    assert (report.failed, len(report.failures)) == (50, 10)


def test_a_long_passage_stays_one_and_its_end_is_found(
    run: Run, store: Store, name: str, embedder: Embedder, tmp_path: Path
) -> None:
    """MiniLM reads 254 tokens: what stands behind them would be lost to truncation."""
    filler = "The committee met again and discussed the budget of the year. " * 60
    end = "Penguins cannot fly but they swim very well."
    run(write_rows(tmp_path / "p.jsonl", {"id": "long", "text": filler + end}, {"id": "other", "text": filler}))

    (found,) = ChromaRetriever(store, embedder).retrieve(["Can penguins fly?"], name, 2)

    assert [passage.id for passage in found] == ["long", "other"]
    assert found[0].text == filler + end
    assert found[0].score > found[1].score + 0.005


def test_what_holds_nothing_makes_no_collection(run: Run, store: Store, name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        run(tmp_path)
    assert caught.value.error_code == "nothing_to_ingest"

    (tmp_path / "empty.txt").touch()
    report = run(tmp_path / "absent", tmp_path / "empty.txt")

    assert [failure.code for failure in report.failures] == ["no_such_file", "empty_file"]
    assert name not in store.names()


def test_questions_find_their_passages_in_one_call(
    run: Run, settings: Settings, store: Store, embedder: Embedder, name: str, docs: Path
) -> None:
    run(docs)
    retriever = ChromaRetriever(store, embedder)

    notice, cats = retriever.retrieve(["How long is the notice period?", "How long do cats sleep?"], name, 2)

    assert (notice[0].document, cats[0].document) == ("docs/notice.txt", "docs/cats.html")
    assert cats[0].title == "Cats"
    assert notice[0].score > notice[1].score
    assert retriever.retrieve(["x"], name, 0) == [[]]
    assert retriever.retrieve([], name, 3) == []


def test_equal_scores_are_ordered_by_id(run: Run, store: Store, embedder: Embedder, name: str, tmp_path: Path) -> None:
    run(write_rows(tmp_path / "p.jsonl", *({"id": id_, "text": "The same."} for id_ in "cab")))

    (found,) = ChromaRetriever(store, embedder).retrieve(["same"], name, 3)

    assert [passage.id for passage in found] == ["a", "b", "c"]


def test_a_collection_made_anew_is_found_again(
    run: Run, store: Store, embedder: Embedder, name: str, docs: Path
) -> None:
    run(docs)
    retriever = ChromaRetriever(store, embedder)
    retriever.retrieve(["x"], name, 1)
    store.delete(name)
    with pytest.raises(NotFoundError):
        retriever.retrieve(["x"], name, 1)

    run(docs)

    assert len(retriever.retrieve(["x"], name, 1)[0]) == 1


def test_vectors_have_unit_length_whatever_the_length_of_the_text(embedder: Embedder) -> None:
    vectors = embedder.embed(["short", "long " * 700, "", "   "])

    assert vectors.shape == (4, embedder.dimension)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_langchain_gets_the_same_passages(
    run: Run, settings: Settings, embedder: Embedder, name: str, docs: Path
) -> None:
    from ragspec.corpus.langchain import RagspecRetriever

    run(docs)
    retriever = RagspecRetriever(retriever=load_retriever(settings, embedder), collection=name, top_k=1)

    (document,) = retriever.invoke("How long is the notice period?")

    assert document.page_content == "The notice period is four weeks."
    assert document.metadata["source"] == "docs/notice.txt"


def test_the_commands_report_and_exit_as_documented(
    chroma_url: str, name: str, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGSPEC_CHROMA_URL", chroma_url)
    (docs / "empty.txt").touch()
    runner = CliRunner()

    done = runner.invoke(ingest_command, [str(docs), "--collection", name, "--json"])
    assert done.exit_code == 65
    assert f"{docs}/empty.txt: [empty_file] It is empty." in done.stderr
    assert json.loads(done.stdout)["added"] == 3

    done = runner.invoke(search, ["How long do cats sleep?", "--collection", name, "--top-k", "1", "--json"])
    assert json.loads(done.stdout)["document"] == "docs/cats.html"

    done = runner.invoke(collections, ["--documents", "--json"])
    (row,) = [row for row in map(json.loads, done.stdout.splitlines()) if row["name"] == name]
    assert row["documents"] == 3
    with monkeypatch.context() as patched:
        patched.delattr(Store, "count_documents")  # it reads the whole collection
        done = runner.invoke(collections, ["--json"])
    (row,) = [row for row in map(json.loads, done.stdout.splitlines()) if row["name"] == name]
    assert "documents" not in row

    assert runner.invoke(collections, ["--delete", name], input="n\n").exit_code == 1
    assert runner.invoke(collections, ["--delete", name, "--yes"]).exit_code == 0
    assert name not in runner.invoke(collections, []).stdout
