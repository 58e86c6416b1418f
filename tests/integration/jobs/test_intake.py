"""Recording jobs on a real PostgreSQL: all or nothing, once, and resumable."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from ragspec.errors import InputError
from ragspec.jobs.cancel import cancel_job
from ragspec.jobs.intake import Recorded, RowsRejectedError, queued_shards, record_job
from ragspec.jobs.options import AnswerOptions
from ragspec.jobs.row import ParsedRow, RowFault
from ragspec.jobs.status import find_job, job_status, list_jobs
from ragspec.jobs.tables import Job, QuestionRow, RowError, Shard

pytestmark = pytest.mark.services

OPTIONS = AnswerOptions(collection="handbook")


def rows(n: int, start: int = 1) -> list[ParsedRow | RowFault]:
    return [ParsedRow(line, f"q{line}", f"question {line}?", {"seed": line}) for line in range(start, start + n)]


def record(engine: Engine, given: list[ParsedRow | RowFault], options: AnswerOptions = OPTIONS, **how: Any) -> Recorded:
    return record_job(engine, iter(given), options, source_name="q.jsonl", shard_size=how.pop("shard_size", 2), **how)


def count(engine: Engine, table: Any) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def test_rows_become_questions_in_order_and_contiguous_shards(engine: Engine) -> None:
    recorded = record(engine, rows(5))

    assert (recorded.created, recorded.questions, recorded.row_errors) == (True, 5, 0)
    with engine.connect() as connection:
        questions = connection.execute(
            select(QuestionRow.idx, QuestionRow.custom_id, QuestionRow.row_options).order_by(QuestionRow.idx)
        ).all()
        shards = connection.execute(select(Shard.start_idx, Shard.end_idx).order_by(Shard.shard_no)).all()
    assert [tuple(row) for row in questions] == [(n - 1, f"q{n}", {"seed": n}) for n in range(1, 6)]
    assert [tuple(row) for row in shards] == [(0, 2), (2, 4), (4, 5)]
    assert [message.questions for message in queued_shards(engine, recorded.job_id)] == [2, 2, 1]
    assert job_status(engine, recorded.job_id).state == "in_progress"


def test_one_bad_row_among_many_rejects_the_file_and_records_nothing(engine: Engine) -> None:
    bad = RowFault(7, "invalid_json_line", "Not JSON.", "Write JSON.")

    with pytest.raises(RowsRejectedError, match=r"line 7: \[invalid_json_line\]") as caught:
        record(engine, [*rows(6), bad, *rows(20, start=8)])

    assert (caught.value.error_code, caught.value.exit_status, caught.value.total) == ("invalid_json_line", 65, 1)
    assert count(engine, Job) == 0


def test_many_bad_rows_are_counted_and_the_first_are_shown(engine: Engine) -> None:
    faults: list[ParsedRow | RowFault] = [RowFault(line, "empty_question", "Empty.") for line in range(1, 31)]

    with pytest.raises(RowsRejectedError, match="30 rows cannot be asked") as caught:
        record(engine, faults)

    assert [fault.line for fault in caught.value.faults] == list(range(1, 21))
    assert "and 10 more" in str(caught.value)


def test_skipped_rows_are_recorded_with_line_and_code(engine: Engine) -> None:
    bad = RowFault(3, "empty_question", "The question is empty.", "Write one.", "c")

    recorded = record(engine, [*rows(2), bad, *rows(1, start=4)], skip_faults=True)

    assert (recorded.questions, recorded.row_errors, recorded.faults) == (3, 1, (bad,))
    with engine.connect() as connection:
        row = connection.execute(select(RowError.line, RowError.code, RowError.custom_id)).one()
    assert tuple(row) == (3, "empty_question", "c")


def test_with_no_good_row_left_there_is_nothing_to_record(engine: Engine) -> None:
    with pytest.raises(RowsRejectedError, match="No row is left"):
        record(engine, [RowFault(1, "empty_question", "Empty.")], skip_faults=True)
    with pytest.raises(InputError) as caught:
        record(engine, [])

    assert caught.value.error_code == "empty_file"
    assert count(engine, Job) == 0


def test_an_id_that_comes_twice_is_an_error_that_names_both_lines(engine: Engine) -> None:
    twice: list[ParsedRow | RowFault] = [
        ParsedRow(1, "a", "Who?"),
        ParsedRow(2, "b", "What?"),
        ParsedRow(3, "a", "Why?"),
    ]

    with pytest.raises(RowsRejectedError, match=r"line 3: .*custom_id 'a' was taken by line 1") as caught:
        record(engine, twice)
    assert caught.value.error_code == "duplicate_custom_id"

    recorded = record(engine, twice, skip_faults=True)
    assert (recorded.questions, recorded.row_errors) == (2, 1)


def test_a_reader_that_fails_half_way_leaves_nothing(engine: Engine) -> None:
    def broken() -> Iterator[ParsedRow]:
        yield ParsedRow(1, "a", "Who?")
        raise InputError("damaged", code="corrupt_gzip")

    with pytest.raises(InputError, match="damaged"):
        record_job(engine, broken(), OPTIONS, source_name="q", shard_size=2)

    assert count(engine, Job) == 0


def test_the_same_rows_and_options_resume_and_anything_else_does_not(engine: Engine) -> None:
    first = record(engine, rows(3))

    again = record(engine, rows(3), shard_size=9)
    other_rows = record(engine, rows(4))
    other_options = record(engine, rows(3), OPTIONS.model_copy(update={"max_tokens": 5}))

    assert (again.job_id, again.created, again.questions) == (first.job_id, False, 3)
    assert len({first.job_id, other_rows.job_id, other_options.job_id}) == 3


def test_new_answers_again_and_is_what_later_submissions_resume(engine: Engine) -> None:
    first = record(engine, rows(3))
    second = record(engine, rows(3), new=True)

    assert second.created
    assert second.job_id != first.job_id
    assert record(engine, rows(3)).job_id == second.job_id


def test_a_cancelled_job_is_not_resumed(engine: Engine) -> None:
    first = record(engine, rows(3))
    cancel_job(engine, first.job_id)

    assert record(engine, rows(3)).created


def test_of_two_producers_at_once_one_records_and_the_other_resumes(engine: Engine) -> None:
    start = Barrier(3)

    def race(_: int) -> Recorded:
        start.wait()
        return record(engine, rows(500))

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(race, range(3)))

    assert sorted(result.created for result in results) == [False, False, True]
    assert len({result.job_id for result in results}) == 1
    assert (count(engine, Job), count(engine, QuestionRow)) == (1, 500)


def test_jobs_are_found_by_id_prefix_and_last(engine: Engine) -> None:
    first, second = record(engine, rows(1)), record(engine, rows(2))

    assert find_job(engine, str(first.job_id)) == first.job_id
    assert find_job(engine, str(first.job_id)[:13].upper()) == first.job_id
    assert find_job(engine, "last") == second.job_id
    assert [status.job_id for status in list_jobs(engine)] == [second.job_id, first.job_id]


def test_a_beginning_that_several_jobs_share_is_ambiguous(engine: Engine) -> None:
    beginnings = [str(record(engine, rows(n)).job_id)[0] for n in range(1, 18)]
    shared = next(letter for letter in beginnings if beginnings.count(letter) > 1)

    with pytest.raises(InputError) as caught:
        find_job(engine, shared)

    assert caught.value.error_code == "ambiguous_job"


@pytest.mark.parametrize("name", ["last", "ffff", "00000000-0000-0000-0000-000000000000", "%", "nonsense", ""])
def test_a_job_that_does_not_exist_is_named(engine: Engine, name: str) -> None:
    from ragspec.errors import NotFoundError

    with pytest.raises(NotFoundError) as caught:
        find_job(engine, name)

    assert caught.value.error_code == "unknown_job"
