"""Bad input at the command line: one sentence with a code, an exit status, and nothing half done."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine, func, select

from ragspec.cli import main
from ragspec.corpus.store import Store, open_store
from ragspec.jobs.answers import record_answers
from ragspec.jobs.claims import finish_shard
from ragspec.jobs.status import job_status
from ragspec.jobs.tables import Job
from ragspec.settings import load_settings
from tests.integration.home import temporary_home
from tests.integration.jobs.worlds import claim, completed, make_job

pytestmark = pytest.mark.services

QUESTION = b'{"question": "Who?"}\n'
EMBEDDER = "tiny@0123456789abcdef"
HALF = 5_000
NOWHERE = "127.0.0.1:1"


Refused = Callable[..., tuple[int, str, str]]


@pytest.fixture
def refused(
    engine: Engine,
    database_url: str,
    redis_url: str,
    chroma_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Refused]:
    """Run a command that must refuse, in a folder with `q.jsonl`: exit status, code and words; it says nothing else."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("DATABASE", database_url), ("REDIS", redis_url), ("CHROMA", chroma_url)):
        monkeypatch.setenv(f"RAGSPEC_{name}_URL", value)
    monkeypatch.setenv("RAGSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAGSPEC_EMBEDDER", "tiny")
    (tmp_path / "q.jsonl").write_bytes(QUESTION)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ragspec", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error["), said.err
        code, _, words = said.err.removeprefix("error[").partition("]: ")
        return int(str(ended.value.code)), code, words

    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        yield run
        assert client.llen("bulk") == 0
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(Job).where(Job.state != "completed")).scalar() == 0


@pytest.fixture(scope="module")
def store(chroma_url: str) -> Iterator[Store]:
    with open_store(load_settings(chroma_url=chroma_url)) as store:
        yield store


@pytest.fixture(scope="module")
def collection(store: Store) -> Iterator[str]:
    """A collection of one passage, built with an embedder named `tiny`."""
    name = f"bad-input-{uuid.uuid4().hex}"
    store.create(name, EMBEDDER, 2).upsert(ids=["a"], embeddings=[[1.0, 0.0]], documents=["x"])
    yield name
    store.delete(name)


@pytest.fixture(scope="module")
def empty_collection(store: Store) -> Iterator[str]:
    name = f"bad-input-{uuid.uuid4().hex}"
    store.create(name, EMBEDDER, 2)
    yield name
    store.delete(name)


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (b"", "empty_file", "q.jsonl is empty"),
        (b"\n \n", "empty_file", "no question"),
        (QUESTION * HALF + b"Who?\n" + QUESTION * HALF, "invalid_json_line", "line 5001"),
        ('{"question": "Où?"}\n'.encode("latin-1"), "not_utf8", "line 1"),
        ('{"question": "Who?"}\n'.encode("utf-16"), "not_utf8", "UTF-16"),
        (QUESTION + json.dumps({"question": "x" * 10_000_000}).encode(), "question_too_long", "line 2"),
    ],
    ids=["no-bytes", "no-question", "one-bad-line", "latin-1", "utf-16", "10-MB-question"],
)
def test_a_file_that_cannot_be_asked_is_refused_whole(
    refused: Refused, collection: str, content: bytes, code: str, named: str
) -> None:
    Path("q.jsonl").write_bytes(content)

    status, said, words = refused("submit", "q.jsonl", "--collection", collection)

    assert (status, said) == (65, code)
    assert named in words
    assert len(words) < 1000


@pytest.mark.parametrize(
    ("name", "status", "code"), [("bad-input-nowhere", 66, "unknown_collection"), ("ab", 65, "bad_collection_name")]
)
def test_a_collection_that_cannot_be_is_refused(refused: Refused, name: str, status: int, code: str) -> None:
    assert refused("submit", "q.jsonl", "--collection", name)[:2] == (status, code)
    assert refused("search", "Who?", "--collection", name)[:2] == (status, code)


def test_an_empty_collection_is_refused(refused: Refused, empty_collection: str) -> None:
    status, code, words = refused("submit", "q.jsonl", "--collection", empty_collection)

    assert (status, code) == (65, "empty_collection")
    assert f"ragspec ingest PATH --collection {empty_collection}" in words


def test_an_embedder_other_than_the_collections_is_refused(
    refused: Refused, collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGSPEC_EMBEDDER", "other")

    status, code, words = refused("submit", "q.jsonl", "--collection", collection)

    assert (status, code) == (65, "embedder_mismatch")
    assert EMBEDDER in words
    assert "other" in words


@pytest.mark.parametrize(
    ("setting", "url"),
    [
        ("RAGSPEC_REDIS_URL", f"redis://:hunter2@{NOWHERE}/0"),
        ("RAGSPEC_DATABASE_URL", f"postgresql://me:hunter2@{NOWHERE}/jobs"),
        ("RAGSPEC_CHROMA_URL", f"http://{NOWHERE}"),
    ],
)
def test_a_service_that_is_down_at_submit_is_named(
    refused: Refused, collection: str, setting: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, url)

    status, code, words = refused("submit", "q.jsonl", "--collection", collection)

    assert (status, code) == (69, "service_unavailable")
    assert setting in words
    assert "hunter2" not in words


@pytest.mark.parametrize("job", ["no-such-job", str(uuid.UUID(int=0)), "last"])
def test_a_job_that_does_not_exist_is_named(refused: Refused, job: str) -> None:
    status, code, words = refused("results", job, "-o", "out.jsonl")

    assert (status, code) == (66, "unknown_job")
    assert job in words
    assert not Path("out.jsonl").exists()


def test_cancelling_a_finished_job_changes_nothing(refused: Refused, engine: Engine) -> None:
    job_id = make_job(engine, questions=1, shard_size=1)
    held = claim(engine, job_id)
    record_answers(engine, held, [completed(0)])
    finish_shard(engine, held)
    before = job_status(engine, job_id)

    status, code, words = refused("cancel", str(job_id))

    assert (status, code) == (73, "job_finished")
    assert "completed already" in words
    assert job_status(engine, job_id) == before


def test_ingesting_without_the_embedder_makes_no_collection(
    refused: Refused, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGSPEC_EMBEDDER", "no/such")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("a.txt").write_text("Words.")
    name = f"bad-input-{uuid.uuid4().hex}"

    status, code, words = refused("ingest", "a.txt", "--collection", name)

    assert (status, code) == (69, "model_unavailable")
    assert "no/such" in words
    assert name not in store.names()


def test_up_without_its_target_says_what_was_tried_and_leaves_nothing_running(
    database_url: str, chroma_url: str
) -> None:
    """The worker's own words and exit status reach whoever started everything."""
    with temporary_home() as home:
        home.set(database_url=database_url, chroma_url=chroma_url, model="no/such")
        home.environment["HF_HUB_OFFLINE"] = "1"

        up = home.ragspec("up", "--no-flower")

        assert up.returncode == 69
        assert "error[not_started]: worker ended with status 69 while it started" in up.stderr
        assert "error[model_unavailable]: Model 'no/such' cannot be had. Tried (1) the local folder" in up.stderr
        assert "Traceback" not in up.stderr
        assert home.ragspec("down").stdout.startswith("Nothing runs")
