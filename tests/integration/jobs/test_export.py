"""Exports of a real job, read back."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, insert

from ragspec.errors import NotFoundError, RagspecError
from ragspec.jobs.answers import record_answers
from ragspec.jobs.export import export_answers, find_answer, stream_answers
from ragspec.jobs.tables import RowError
from tests.integration.jobs.worlds import claim, completed, failed, make_job

pytestmark = pytest.mark.services


@pytest.fixture
def job(engine: Engine) -> Any:
    """A running job: question 0 answered, 1 failed, the others open, one row of its file skipped."""
    job_id = make_job(engine)
    record_answers(engine, claim(engine, job_id), [completed(0, 'Paris, "la\nbelle"'), failed(1)])
    with engine.begin() as connection:
        connection.execute(
            insert(RowError).values(job_id=job_id, line=9, custom_id="z", code="empty_question", message="Empty.")
        )
    return job_id


def test_jsonl_holds_everything_that_is_recorded_of_what_is_answered(engine: Engine, job: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    assert export_answers(engine, job, "jsonl", str(output)) == 2

    first, second = (json.loads(line) for line in output.read_text().splitlines())
    assert (first["custom_id"], first["question"], first["answer"]) == ("q0", "question 0?", 'Paris, "la\nbelle"')
    assert first["passages"] == completed(0).passages
    assert first["timings"] == {"queued_ms": 1.0, "retrieval_ms": 2.0, "prefill_ms": 3.0, "decode_ms": 4.0}
    assert first["acceptance"]["token_sources"] == ["target", "passage", "answer", "target", "target"]
    assert first["acceptance"]["per_step_accepted"] == [2, 0]
    assert first["acceptance"]["num_draft_tokens"] == 3
    assert first["error"] is None
    assert second["error"] == {"code": "prompt_too_long", "message": "It does not fit."}
    assert second["status"] == "failed"


def test_csv_survives_quotes_and_line_breaks(engine: Engine, job: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    export_answers(engine, job, "csv", str(output))

    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert [row["answer"] for row in rows] == ['Paris, "la\nbelle"', ""]
    assert (rows[0]["num_draft_tokens"], rows[0]["passages"], rows[1]["error_code"]) == (
        "3",
        '["p1"]',
        "prompt_too_long",
    )


def test_parquet_holds_the_same_as_jsonl(engine: Engine, job: Any, tmp_path: Path) -> None:
    export_answers(engine, job, "parquet", str(tmp_path / "out.parquet"))
    export_answers(engine, job, "jsonl", str(tmp_path / "out.jsonl"))

    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    for row, line in zip(rows, lines, strict=True):
        error = line.pop("error") or {"code": None, "message": None}
        passages = [{**passage, "metadata": json.dumps(passage["metadata"])} for passage in line.pop("passages")]
        flat = {**line, **line.pop("acceptance"), **line.pop("timings"), "passages": passages}
        del flat["acceptance"], flat["timings"]
        assert row == {**flat, "error_code": error["code"], "error_message": error["message"]}


def test_openai_lines_have_a_response_or_an_error_and_name_skipped_rows(
    engine: Engine, job: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert export_answers(engine, job, "openai", str(output)) == 2

    good, bad, skipped = (json.loads(line) for line in output.read_text().splitlines())
    body = good["response"]["body"]
    assert (good["custom_id"], good["error"], good["response"]["status_code"]) == ("q0", None, 200)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": 'Paris, "la\nbelle"'}
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert (bad["response"], bad["error"]["code"]) == (None, "prompt_too_long")
    assert (skipped["custom_id"], skipped["error"]) == (
        "z",
        {"code": "empty_question", "message": "Empty.", "line": 9},
    )


def test_a_file_is_replaced_whole_or_not_at_all(
    engine: Engine, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("earlier")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RagspecError, match="No space left on device"):
        export_answers(engine, job, "jsonl", str(output))

    assert output.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [output]


def test_a_folder_that_does_not_exist_is_named(engine: Engine, job: Any, tmp_path: Path) -> None:
    with pytest.raises(RagspecError, match=r"nowhere/out.jsonl cannot be written"):
        export_answers(engine, job, "jsonl", str(tmp_path / "nowhere" / "out.jsonl"))


def test_answers_come_in_the_files_order_more_than_one_fetch_of_them(engine: Engine) -> None:
    job_id = make_job(engine, questions=450, shard_size=450)
    record_answers(engine, claim(engine, job_id), [failed(idx) for idx in reversed(range(450))])

    assert [answer.idx for _, _, answer in stream_answers(engine, job_id)] == list(range(450))


def test_a_row_that_was_skipped_says_why_it_has_no_answer(engine: Engine) -> None:
    job_id = make_job(engine)
    fault = {"line": 7, "custom_id": "b5", "code": "empty_question", "message": "The question is empty.", "advice": ""}
    with engine.begin() as connection:
        connection.execute(insert(RowError).values(job_id=job_id, **fault))

    with pytest.raises(NotFoundError, match=r"Line 7, b5, was skipped .*: The question is empty\.") as caught:
        find_answer(engine, job_id, "b5")
    assert caught.value.error_code == "skipped_row"


def test_an_answer_is_found_by_its_id_or_its_place(engine: Engine, job: Any) -> None:
    assert find_answer(engine, job, "q0")[2] == find_answer(engine, job, "0")[2]
    for name, code in (("q2", "unanswered"), ("q9", "unknown_question"), ("9" * 20, "unknown_question")):
        with pytest.raises(NotFoundError) as caught:
            find_answer(engine, job, name)
        assert caught.value.error_code == code
