"""Collections in a real Chroma server, looked at without any model."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from ragspec.corpus.store import Store, check_collection, open_store
from ragspec.errors import InputError, NotFoundError, RagspecError, ServiceUnavailableError
from ragspec.settings import Settings, load_settings

pytestmark = pytest.mark.services
EMBEDDER = "tiny@0123456789abcdef"


@pytest.fixture
def settings(chroma_url: str) -> Settings:
    return load_settings(chroma_url=chroma_url, embedder="tiny")


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with open_store(settings) as store:
        yield store


@pytest.fixture
def name(store: Store) -> Iterator[str]:
    """A collection of two passages."""
    name = f"corpus-{uuid.uuid4().hex}"
    collection = store.create(name, EMBEDDER, 2)
    collection.upsert(ids=["a", "b"], embeddings=[[1.0, 0.0], [0.0, 1.0]], documents=["x", "y"])
    yield name
    store.delete(name)


def test_a_collection_says_what_it_was_built_with(store: Store, name: str) -> None:
    info = store.describe(name)

    assert (info.passages, info.embedder, info.dimension, info.space) == (2, EMBEDDER, 2, "cosine")
    assert name in store.names()


def test_a_sound_collection_passes(settings: Settings, name: str) -> None:
    info = check_collection(settings, name)

    assert info is not None
    assert info.passages == 2


def test_an_unknown_collection_names_the_nearest(settings: Settings, name: str) -> None:
    with pytest.raises(NotFoundError, match=f"Did you mean '{name}'") as caught:
        check_collection(settings, name + "x")

    assert caught.value.error_code == "unknown_collection"


def test_an_empty_collection_is_refused(settings: Settings, store: Store, name: str) -> None:
    store.open(name).delete(ids=["a", "b"])

    with pytest.raises(InputError) as caught:
        check_collection(settings, name)

    assert caught.value.error_code == "empty_collection"


def test_another_embedder_is_refused_and_both_are_named(settings: Settings, store: Store, name: str) -> None:
    other = settings.model_copy(update={"embedder": "other"})

    for refused in (lambda: check_collection(other, name), lambda: store.create(name, "other@1", 2)):
        with pytest.raises(InputError, match=f"{EMBEDDER}.*other") as caught:
            refused()
        assert caught.value.error_code == "embedder_mismatch"


@pytest.mark.parametrize("bad", ["ab", "a b", "-ab", "a..b", "127.0.0.1", "x" * 513, "ä-name"])
def test_a_name_that_chroma_refuses_is_refused_here_with_the_rule(settings: Settings, store: Store, bad: str) -> None:
    for refused in (lambda: check_collection(settings, bad), lambda: store.create(bad, EMBEDDER, 2)):
        with pytest.raises(InputError, match="3 to 512 characters") as caught:
            refused()
        assert caught.value.error_code == "bad_collection_name"


def test_a_foreign_retriever_knows_its_own_collections(settings: Settings) -> None:
    assert check_collection(settings.model_copy(update={"retriever": "m:a"}), "anything at all") is None


def test_a_server_that_is_down_is_named() -> None:
    with pytest.raises(ServiceUnavailableError, match=r"http://127\.0\.0\.1:9"):
        check_collection(load_settings(chroma_url="http://127.0.0.1:9"), "corpus-any")


def test_checking_a_collection_imports_no_torch_and_stays_small(chroma_url: str, name: str) -> None:
    """A producer checks the collection of every job within a budget of 250 MB."""
    script = (
        "import psutil, sys; from ragspec.corpus.store import check_collection; "
        "from ragspec.settings import load_settings; "
        f"check_collection(load_settings(chroma_url={chroma_url!r}, embedder='tiny'), {name!r}); "
        "print(*sorted({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)), "
        "psutil.Process().memory_info().rss // 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert int(done.stdout) < 150


def test_errors_are_ours_when_the_server_dies_in_between(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def refuse(*args, **kwargs):
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(store._client, "get_collection", refuse)

    with pytest.raises(RagspecError) as caught:
        store.open("corpus-any")

    assert caught.value.error_code == "service_unavailable"
