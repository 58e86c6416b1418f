"""The main job on real parts: one `ragspec up` with the default model, then what a user types, command by command."""

from __future__ import annotations

import ast
import csv
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import psutil
import psycopg
import pyarrow.parquet as pq
import pytest
from psycopg.rows import dict_row, namedtuple_row

from ragspec.decoding.acceptance import AcceptanceRecord, Source
from ragspec.demo import COLLECTION, questions
from ragspec.models import ensure_target, fingerprint
from ragspec.services.record import ProcessId
from ragspec.settings import DEFAULT_MODEL, load_settings
from tests.integration.home import Home, temporary_home, until

pytestmark = [pytest.mark.services, pytest.mark.model]

ASKED = questions()[:10]
SHARD_SIZE, MAX_TOKENS = 4, 24
SHARDS = [4, 4, 2]
#: Short passages make short prompts: on two cores the prompts are most of the work.
CHUNKS = {"chunk_tokens": "96", "chunk_overlap": "16"}
FLOWER = ("ragspec", "hunter2")


@dataclass(frozen=True, slots=True)
class Job:
    """A finished job: what `submit --wait --json` said of it, and its rows as `results --format jsonl` gives them."""

    id: str
    status: dict[str, Any]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Everything that `ragspec up` starts. The models are those of this machine's cache, fetched where it is empty."""
    with temporary_home() as home:
        home.set(model_cache=str(load_settings().models_folder), **CHUNKS)
        home.set(flower_port="0", flower_password=FLOWER[1])
        up = home.ragspec("up", "--detach")
        assert up.returncode == 0, up.stdout + up.stderr
        yield home


@pytest.fixture(scope="module")
def questions_file(home: Home) -> Path:
    """Ten of the demo's questions, and the collection that answers them: the topics they are about."""
    corpus = home.path / COLLECTION
    corpus.mkdir()
    for name in {Path(row["passage_id"]).stem for row in ASKED}:
        (corpus / f"{name}.txt").write_text(topics[name], encoding="utf-8")
    ingested = home.ragspec("ingest", str(corpus), "--collection", COLLECTION, "--json")
    assert ingested.returncode == 0, ingested.stderr
    assert json.loads(ingested.stdout)["added"] == len(list(corpus.iterdir()))
    return write_questions(home.path / "questions.jsonl", ASKED)


@pytest.fixture(scope="module")
def job(home: Home, questions_file: Path) -> Job:
    status = submit(home, questions_file)
    return Job(status["job_id"], status, export(home, status["job_id"]))


def write_questions(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def submit(home: Home, file: Path, *options: str, exit_status: int = 0) -> dict[str, Any]:
    """Submit with `--wait --json`, unless options say otherwise; the status it prints."""
    size = ("--max-tokens", str(MAX_TOKENS), "--shard-size", str(SHARD_SIZE))
    done = home.ragspec("submit", str(file), "--collection", COLLECTION, *size, "--wait", "--json", *options)
    assert done.returncode == exit_status, done.stderr
    return dict(json.loads(done.stdout))


def export(home: Home, job_id: str) -> list[dict[str, Any]]:
    done = home.ragspec("results", job_id)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def select(home: Home, query: str, job_id: str, row_factory: Any = namedtuple_row) -> list[Any]:
    """What a query about one job, `%s`, finds."""
    with psycopg.connect(home.url("database_url"), row_factory=row_factory) as connection:
        return connection.execute(query, [job_id]).fetchall()


def answered_at(home: Home, job_id: str) -> dict[int, Any]:
    return dict(select(home, "SELECT idx, created_at FROM answers WHERE job_id = %s", job_id))


def shard_tasks(home: Home, job_id: str) -> list[dict[str, Any]]:
    """The job's tasks that Flower knows; `kwargs` as a mapping."""
    url = home.url("flower_url") + "/api/tasks"
    found = httpx.get(url, params={"taskname": "ragspec.answer_shard"}, auth=FLOWER).raise_for_status().json()
    tasks = [{**task, "kwargs": ast.literal_eval(task["kwargs"])} for task in found.values() if task["kwargs"]]
    return [task for task in tasks if task["kwargs"]["job_id"] == job_id]


def test_every_question_is_answered_once_and_in_the_files_order(job: Job) -> None:
    assert (job.status["state"], job.status["created"], job.status["enqueued"]) == ("completed", True, len(SHARDS))
    assert (job.status["completed"], job.status["failed"]) == (len(ASKED), 0)
    assert [(row["custom_id"], row["question"]) for row in job.rows] == [
        (asked["custom_id"], asked["question"]) for asked in ASKED
    ]
    for row in job.rows:
        assert row["status"] == "completed"
        assert row["error"] is None
        assert row["answer"].strip()
        assert row["finish_reason"] == ("length" if row["completion_tokens"] == MAX_TOKENS else "stop")


def test_every_answer_names_its_passages_best_first(job: Job) -> None:
    for row in job.rows:
        scores = [passage["score"] for passage in row["passages"]]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert all(0 < score <= 1 for score in scores)
        for passage in row["passages"]:
            assert passage["text"] in topics[Path(passage["document"]).stem]


def test_every_answer_says_who_gave_it_and_how_long_it_took(job: Job) -> None:
    target = f"{DEFAULT_MODEL}@{fingerprint(ensure_target(load_settings(model=DEFAULT_MODEL)))}"

    # Behind the weights stands the precision that this machine allows.
    (model,) = {row["model"] for row in job.rows}
    assert model in {f"{target}+{precision}" for precision in ("int8", "bfloat16", "float32")}
    (template,) = {row["template_hash"] for row in job.rows}
    assert len(bytes.fromhex(template)) == 8
    for row in job.rows:
        assert set(row["timings"]) == {"queued_ms", "retrieval_ms", "prefill_ms", "decode_ms"}
        assert all(spent >= 0 for spent in row["timings"].values())
        assert row["timings"]["prefill_ms"] > 0
        assert row["prompt_tokens"] > 0


def test_the_parts_of_every_acceptance_record_add_up(job: Job) -> None:
    """By the rules of `ragspec.decoding.acceptance`."""
    for row in job.rows:
        of = row["acceptance"]
        record = AcceptanceRecord(
            tuple(of["token_ids"]),
            tuple(Source[name.upper()] for name in of["token_sources"]),
            tuple(of["token_logprobs"]),
            tuple(of["per_step_drafted"]),
            tuple(of["per_step_accepted"]),
        )
        tokens, steps = len(record.token_ids), len(record.per_step_drafted)
        assert tokens == row["completion_tokens"] == len(record.token_sources) == len(record.token_logprobs)
        assert steps == of["num_verify_steps"] == len(record.per_step_accepted) == sum(of["acceptance_histogram"])
        # One less where the answer was cut inside a draft.
        assert tokens in {1 + sum(record.per_step_accepted) + steps, sum(record.per_step_accepted) + steps}
        drafted_tokens = [source for source in record.token_sources if source is not Source.TARGET]
        assert of["num_accepted_draft_tokens"] == sum(record.per_step_accepted) == len(drafted_tokens)
        assert of["num_draft_tokens"] == sum(record.per_step_drafted)
        assert record.token_sources[0] is Source.TARGET
        for drafted, accepted in zip(record.per_step_drafted, record.per_step_accepted, strict=True):
            assert 0 <= accepted <= drafted
        assert all(logprob <= 0 for logprob in record.token_logprobs)
        for name in ("num_spec_steps", "mean_acceptance_length", "draft_acceptance_rate"):
            assert of[name] == pytest.approx(getattr(record, name))
        assert tuple(of["acceptance_histogram"]) == record.acceptance_histogram


def test_some_tokens_come_out_of_the_passages(job: Job) -> None:
    sources = Counter(source for row in job.rows for source in row["acceptance"]["token_sources"])

    assert sources["passage"] > 0
    assert job.status["accepted_draft_tokens"] == sources.total() - sources["target"]


def test_every_format_tells_the_same(home: Home, job: Job) -> None:
    files = {name: home.path / f"out.{name}" for name in ("csv", "parquet", "openai")}
    for name, file in files.items():
        done = home.ragspec("results", job.id, "--format", name, "-o", str(file))
        assert (done.returncode, done.stderr) == (0, f"{len(ASKED)} answers\n")

    with files["csv"].open(newline="", encoding="utf-8") as file:
        of_csv = list(csv.DictReader(file))
    of_parquet = pq.read_table(files["parquet"]).to_pylist()
    of_openai = [json.loads(line) for line in files["openai"].read_text(encoding="utf-8").splitlines()]
    for row, cells, flat, line in zip(job.rows, of_csv, of_parquet, of_openai, strict=True):
        acceptance = row["acceptance"]
        for name in ("custom_id", "question", "answer", "model", "template_hash"):
            assert row[name] == cells[name] == flat[name]
        assert json.loads(cells["passages"]) == [passage["id"] for passage in row["passages"]]
        assert int(cells["num_draft_tokens"]) == acceptance["num_draft_tokens"]
        assert [passage["score"] for passage in flat["passages"]] == [passage["score"] for passage in row["passages"]]
        for name in ("token_ids", "token_sources", "per_step_drafted", "per_step_accepted"):
            assert flat[name] == acceptance[name]
        assert (line["custom_id"], line["error"]) == (row["custom_id"], None)
        assert line["response"]["status_code"] == 200
        body = line["response"]["body"]
        assert body["choices"][0]["message"] == {"role": "assistant", "content": row["answer"]}
        assert body["usage"]["completion_tokens"] == row["completion_tokens"]


def test_show_prints_the_answer_its_steps_and_its_passages(home: Home, job: Job) -> None:
    row = job.rows[0]

    shown = home.ragspec("show", job.id, row["custom_id"])

    assert shown.returncode == 0, shown.stderr
    assert f"{row['custom_id']}  {row['question']}" in shown.stdout
    assert row["answer"] in shown.stdout
    accepted = row["acceptance"]["num_accepted_draft_tokens"]
    assert f"{accepted}/{row['acceptance']['num_draft_tokens']} draft tokens accepted" in shown.stdout
    for rank, passage in enumerate(row["passages"], 1):
        assert f"[{rank}] {passage['score']:.3f}  {passage['document']}" in shown.stdout


def test_evaluate_counts_the_gold_passages_that_were_found(home: Home, job: Job) -> None:
    gold = {asked["custom_id"]: asked["passage_id"] for asked in ASKED}
    hits = [gold[row["custom_id"]] in {passage["document"] for passage in row["passages"]} for row in job.rows]

    scores = home.ragspec("evaluate", job.id, "--json")

    assert scores.returncode == 0, scores.stderr
    found = json.loads(scores.stdout)
    assert (found["ranked"], found["k"], found["recall"]) == (len(ASKED), 3, sum(hits) / len(hits))
    assert sum(hits) > len(hits) / 2


def test_submitting_again_answers_nothing_again(home: Home, job: Job, questions_file: Path) -> None:
    before = answered_at(home, job.id)

    again = submit(home, questions_file)

    assert (again["job_id"], again["created"], again["enqueued"]) == (job.id, False, 0)
    assert answered_at(home, job.id) == before
    assert export(home, job.id) == job.rows


def test_the_views_tell_what_the_rows_tell(home: Home, job: Job) -> None:
    query = "SELECT * FROM token_acceptance WHERE job_id = %s ORDER BY idx, position"
    of_view = {name: list(of) for name, of in groupby(select(home, query, job.id), lambda token: token.custom_id)}

    (total,) = select(home, "SELECT * FROM job_acceptance WHERE job_id = %s", job.id, dict_row)

    assert set(of_view) == {row["custom_id"] for row in job.rows}
    for row in job.rows:
        of, tokens = row["acceptance"], of_view[row["custom_id"]]
        assert [token.token_id for token in tokens] == of["token_ids"]
        assert [token.source for token in tokens] == of["token_sources"]
        assert [token.logprob for token in tokens] == of["token_logprobs"]
        steps = list(dict.fromkeys((token.step, token.drafted, token.accepted) for token in tokens))[1:]
        assert [drafted for _, drafted, _ in steps] == of["per_step_drafted"]
        assert [accepted for _, _, accepted in steps] == of["per_step_accepted"]
    sources = Counter(source for row in job.rows for source in row["acceptance"]["token_sources"])
    assert total["answers"] == len(job.rows)
    assert total["tokens"] == sources.total() == job.status["completion_tokens"]
    assert total["steps"] == job.status["verify_steps"]
    assert (total["drafted"], total["accepted"]) == (job.status["draft_tokens"], job.status["accepted_draft_tokens"])
    for source in Source:
        assert total[f"tokens_{source.name.lower()}"] == sources[source.name.lower()]
    for name in ("mean_acceptance_length", "draft_acceptance_rate"):
        assert float(total[name]) == pytest.approx(job.status[name])


def test_flower_shows_every_shard_with_its_job_and_its_questions(home: Home, job: Job) -> None:
    """Its API asks for the password that its pages ask for."""
    url = home.url("flower_url") + "/api/tasks"
    until(lambda: [task["state"] for task in shard_tasks(home, job.id)] == ["SUCCESS"] * len(SHARDS))

    tasks = sorted(shard_tasks(home, job.id), key=lambda task: task["kwargs"]["shard_no"])

    assert [task["kwargs"] for task in tasks] == [
        {"job_id": job.id, "shard_no": number, "questions": size} for number, size in enumerate(SHARDS)
    ]
    assert [task["result"] for task in tasks] == [f"'{size} answered, 0 failed'" for size in SHARDS]
    assert all(task["worker"].startswith("ragspec-bulk-") for task in tasks)
    assert httpx.get(url).status_code == 401


def test_a_question_that_no_window_holds_fails_alone_with_its_code(home: Home, questions_file: Path) -> None:
    good, other = ASKED[0], ASKED[1]
    long = {"custom_id": "long", "question": "Why is that so? " * 800}
    file = write_questions(home.path / "long.jsonl", [good, long, other])

    status = submit(home, file, exit_status=3)

    assert (status["state"], status["completed"], status["failed"]) == ("completed", 2, 1)
    rows = {row["custom_id"]: row for row in export(home, status["job_id"])}
    assert rows["long"]["error"]["code"] == "question_too_long"
    assert "RAGSPEC_CONTEXT_WINDOW" in rows["long"]["error"]["message"]
    assert rows[good["custom_id"]]["status"] == rows[other["custom_id"]]["status"] == "completed"


def test_an_engine_killed_in_mid_job_costs_no_answer(home: Home, questions_file: Path) -> None:
    """The answers that were there stay as they are, and the next engine gives the others."""
    worker = psutil.Process(home.child("worker").pid)
    (engine,) = (child for child in worker.children() if "worker.resident" in child.cmdline())
    options = ("--new", "--shard-size", "2", "--max-tokens", "64", "--collection", COLLECTION)
    job_id = home.ragspec("submit", str(questions_file), *options).stdout.strip()
    until(lambda: bool(answered_at(home, job_id)))
    engine.kill()
    until(lambda: not engine.is_running())
    before = answered_at(home, job_id)

    watched = home.ragspec("status", job_id, "--watch", "--json")

    assert watched.returncode == 0, watched.stderr
    assert 0 < len(before) < len(ASKED)
    after = answered_at(home, job_id)
    assert sorted(after) == list(range(len(ASKED)))
    assert before.items() <= after.items()
    assert [row["status"] for row in export(home, job_id)] == ["completed"] * len(ASKED)


def test_down_leaves_no_process(home: Home) -> None:
    up = home.record().supervisor.find()
    assert up is not None
    tree = [up, *up.children(recursive=True)]
    processes = [ProcessId.of(process.name(), process.pid) for process in tree]
    assert {child.name for child in home.record().children} >= {"redis", "postgres", "chroma", "worker", "beat"}

    down = home.ragspec("down")

    assert down.returncode == 0, down.stderr
    assert [process for process in processes if process and process.find()] == []
