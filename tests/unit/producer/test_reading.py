"""Question files, read: every format, and every way in which one can be bad."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producer.formats import detect
from producer.rows import fitted
from producer.source import open_source
from producer.submit import read_rows
from ragspec.errors import InputError, NotFoundError
from ragspec.jobs.options import MAX_QUESTION_CHARS, AnswerOptions, RowOptions
from ragspec.jobs.row import ParsedRow, RowFault
from ragspec.streams import MAX_LINE_BYTES


def read(path: Path | str, file_format: Any = None) -> list[ParsedRow | RowFault]:
    with open_source(str(path)) as source:
        return list(read_rows(source, file_format or detect(source)))


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def faults(rows: list[ParsedRow | RowFault]) -> list[tuple[int, str]]:
    return [(row.line, row.code) for row in rows if isinstance(row, RowFault)]


def questions(rows: list[ParsedRow | RowFault]) -> list[tuple[str, str]]:
    return [(row.custom_id, row.text) for row in rows if isinstance(row, ParsedRow)]


TWO = [("a", "Who?"), ("b", "What, and why?")]
JSONL = '{"custom_id": "a", "question": "Who?"}\n{"id": "b", "query": "What, and why?", "answers": ["x"]}\n'
CSV = 'custom_id,question,note\na,Who?,\nb,"What, and why?",n\n'


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.jsonl", JSONL),
        ("q.ndjson", JSONL.replace("\n", "\r\n\r\n")),
        ("q", "\ufeff" + JSONL.rstrip("\n")),
        ("q.csv", CSV),
        ("q.csv", "\ufeff" + CSV.replace("\n", "\r\n")),
        ("q.tsv", CSV.replace(",", "\t").replace("What\t and", "What, and")),
    ],
)
def test_every_text_format_is_read_plain_and_zipped(tmp_path: Path, name: str, content: str, zipped: bool) -> None:
    data = gzip.compress(content.encode(), mtime=0) if zipped else content.encode()

    assert questions(read(write(tmp_path, name + (".gz" if zipped else ""), data))) == TWO


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_parquet_is_read_plain_and_zipped(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "q.parquet"
    table = {"id": ["a", "b"], "question": [text for _, text in TWO], "seed": [None, 7], "other": [[1], [2]]}
    pq.write_table(pa.table(table), path)
    if zipped:
        path = write(tmp_path, "q.parquet.gz", gzip.compress(path.read_bytes(), mtime=0))

    rows = read(path)

    assert questions(rows) == TWO
    assert [row.row_options for row in rows if isinstance(row, ParsedRow)] == [{}, {"seed": 7}]


def test_plain_text_is_one_question_a_line_named_by_its_line(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "q.txt", "Who?\n\n  What?  \n"))

    assert questions(rows) == [("row-000001", "Who?"), ("row-000003", "What?")]


def test_standard_input_is_told_by_its_first_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.BufferedReader(io.BytesIO(gzip.compress(JSONL.encode(), mtime=0)))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))

    assert questions(read("-")) == TWO


def test_rows_may_set_options_in_any_format(tmp_path: Path) -> None:
    wanted = {"top_k": 5, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["\n"]}
    wanted |= {"min_tokens": 2, "repetition_penalty": 1.1, "presence_penalty": -1.0, "frequency_penalty": 0.5}
    as_json = read(write(tmp_path, "q.jsonl", json.dumps({"question": "Who?", **wanted})))
    as_text = [value[0] if isinstance(value, list) else value for value in wanted.values()]
    table = io.StringIO()
    csv.writer(table).writerows([["question", *wanted], ["Who?", *as_text]])
    as_csv = read(write(tmp_path, "q.csv", table.getvalue()))

    assert [row.row_options for row in (*as_json, *as_csv) if isinstance(row, ParsedRow)] == [wanted, wanted]


def test_a_row_may_bias_tokens_by_their_ids(tmp_path: Path) -> None:
    (row,) = read(write(tmp_path, "q.jsonl", '{"question": "Who?", "logit_bias": {"17": -100}}'))

    assert isinstance(row, ParsedRow)
    assert RowOptions.model_validate(row.row_options).logit_bias == {17: -100.0}


def test_a_quoted_field_keeps_its_line_breaks_and_the_next_row_its_line(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "q.csv", 'question\n"Who\n\nis?"\nWhat?\n'))

    assert questions(rows) == [("row-000002", "Who\n\nis?"), ("row-000005", "What?")]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{", "invalid_json_line"),
        ('"Who?"', "invalid_json_line"),
        ("[" * 100_000, "invalid_json_line"),
        ('{"custom_id": "x"}', "missing_question"),
        ('{"question": 3}', "missing_question"),
        ('{"question": " "}', "empty_question"),
        (json.dumps({"question": "x" * (MAX_QUESTION_CHARS + 1)}), "question_too_long"),
        (json.dumps({"question": "x" * 10_000_000}), "question_too_long"),
        ('{"question": "\\u0000"}', "bad_character"),
        ('{"question": "\\ud800"}', "bad_character"),
        ('{"question": "Who?", "custom_id": 1.5}', "bad_custom_id"),
        (json.dumps({"question": "Who?", "custom_id": "x" * 513}), "bad_custom_id"),
        ('{"question": "Who?", "temperature": -1}', "bad_option"),
        ('{"question": "Who?", "temperature": NaN}', "bad_option"),
        ('{"question": "Who?", "stop": ""}', "bad_option"),
        ('{"question": "Who?", "max_tokens": "many"}', "bad_option"),
        ('{"question": "Who?", "max_tokens": true}', "bad_option"),
        ('{"question": "Who?", "repetition_penalty": 0}', "bad_option"),
        ('{"question": "Who?", "presence_penalty": 2.5}', "bad_option"),
        ('{"question": "Who?", "logit_bias": {"yes": 1}}', "bad_option"),
        ('{"question": "Who?", "logit_bias": {"17": 101}}', "bad_option"),
        (b'{"question": "caf\xe9"}', "not_utf8"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value)[:40],
)
def test_one_bad_line_is_named_and_the_others_are_read(tmp_path: Path, line: str | bytes, code: str) -> None:
    good = b'{"question": "Who?"}\n'
    bad = line.encode() if isinstance(line, str) else line
    rows = read(write(tmp_path, "q.jsonl", good + bad + b"\n" + good))

    assert faults(rows) == [(2, code)]
    assert questions(rows) == [("row-000001", "Who?"), ("row-000003", "Who?")]


def test_an_endless_line_is_never_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "q.jsonl", b"x" * (8 * MAX_LINE_BYTES) + b'\n{"question": "Who?"}\n')
    longest = 0

    with open_source(str(path)) as source:
        readline = source.stream.readline

        class Watched:
            def readline(self, limit: int) -> bytes:
                nonlocal longest
                line = readline(limit)
                longest = max(longest, len(line))
                return line

        rows = list(read_rows(type(source)(source.name, Watched()), "jsonl"))  # type: ignore[arg-type]

    assert longest <= MAX_LINE_BYTES + 2
    assert faults(rows) == [(1, "question_too_long")]
    assert questions(rows) == [("row-000002", "Who?")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, True) for name in RowOptions.model_fields if name not in {"stop", "logit_bias"}),
        ("logit_bias", {"17": False}),
    ],
)
def test_a_truth_value_is_no_number_in_a_row(tmp_path: Path, field: str, value: object) -> None:
    """Neither in a line of ours nor in one of OpenAI's, where it would pass for 1."""
    (row,) = read(write(tmp_path, "q.jsonl", json.dumps({"question": "Who?", field: value})))

    assert isinstance(row, RowFault)
    assert (row.line, row.code) == (1, "bad_option")
    assert re.fullmatch(rf"{field}[.17]*: must be a number, not (true|false)\.", row.message)


@pytest.mark.parametrize(
    ("own", "job", "said"),
    [
        ({"min_tokens": 200}, {}, "min_tokens: the row's 200 is more than max_tokens, the job's 128."),
        ({"max_tokens": 4}, {"min_tokens": 5}, "min_tokens: the job's 5 is more than max_tokens, the row's 4."),
        ({"min_tokens": 9, "max_tokens": 8}, {}, "min_tokens: the row's 9 is more than max_tokens, the row's 8."),
        ({"min_tokens": 200, "max_tokens": 200}, {}, None),
        ({"min_tokens": 128}, {}, None),
        ({}, {"min_tokens": 5, "max_tokens": 5}, None),
    ],
)
def test_a_least_length_lies_not_above_the_greatest_whoever_sets_them(
    own: dict[str, int], job: dict[str, int], said: str | None
) -> None:
    row = ParsedRow(3, "a", "Who?", own)
    refused = RowFault(3, "bad_option", said or "", "Lower the one, or give the row the other too.", "a")

    assert fitted(row, AnswerOptions(collection="docs", **job)) == (refused if said else row)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ("a,Who, and what?", "bad_csv_row"),
        ('a,"Who"?', "bad_csv_row"),
        ("a,", "missing_question"),
        (b"a,caf\xe9", "not_utf8"),
    ],
)
def test_one_bad_csv_row_is_named_and_the_others_are_read(tmp_path: Path, row: str | bytes, code: str) -> None:
    bad = row.encode() if isinstance(row, str) else row
    rows = read(write(tmp_path, "q.csv", b"id,question\nx,Who?\n" + bad + b"\ny,What?\n"))

    assert faults(rows) == [(3, code)]
    assert questions(rows) == [("x", "Who?"), ("y", "What?")]


def test_a_quote_that_is_never_closed_ends_at_the_longest_field(tmp_path: Path) -> None:
    rows = read(write(tmp_path, "q.csv", 'question\n"' + ("x" * 99 + "\n") * 20_000))

    assert isinstance(rows[0], RowFault)
    assert (rows[0].line, rows[0].code) == (2, "question_too_long")
    assert "has more than 131072 characters by line 1312." in rows[0].message


@pytest.mark.parametrize(("name", "delimiter"), [("q.csv", ","), ("q.tsv", "\t")])
def test_a_quote_that_is_never_closed_is_named_by_the_row_in_which_it_opens(
    tmp_path: Path, name: str, delimiter: str
) -> None:
    rows = read(write(tmp_path, name, f'id{delimiter}question\nx{delimiter}Who?\ny{delimiter}"What?\n' + "z\n" * 50))

    assert questions(rows) == [("x", "Who?")]
    assert faults(rows) == [(3, "unclosed_quote")]
    assert "line 53." in str(rows[1])


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("q.jsonl", b"", "empty_file"),
        ("q.csv", b"a,b\n1,2\n", "missing_question"),
        ("q", b"Who?\n", "unknown_format"),
        ("q.csv.gz", b"question\nWho?\n", "not_gzip"),
        ("q.jsonl.gz", b"Who?\n", "not_gzip"),
        ("q.csv.gz", b"", "empty_file"),
        ("q.txt", "Who?\n".encode("utf-16"), "not_utf8"),
        ("q.csv.gz", gzip.compress("question\nWho?\n".encode("utf-16"), mtime=0), "not_utf8"),
        ("q.jsonl.gz", gzip.compress(JSONL.encode() * 99, mtime=0)[:-12], "corrupt_gzip"),
        ("q.jsonl.gz", gzip.compress(JSONL.encode() * 99, mtime=0)[:60] + bytes(60), "corrupt_gzip"),
        ("q.parquet", b"PAR1 and nothing else", "corrupt_parquet"),
    ],
)
def test_a_file_that_cannot_be_used_as_a_whole_is_an_error(
    tmp_path: Path, name: str, content: bytes, code: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(write(tmp_path, name, content))

    assert caught.value.error_code == code


def test_a_file_that_is_not_there_and_one_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path)


def batch_line(**changes: Any) -> str:
    body = {
        "model": "gpt",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
    }
    body |= changes.pop("body", {})
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body, **changes})


def test_openai_batch_lines_are_read_as_they_are(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "is?"}]}]
    response = {"input": "What?", "max_output_tokens": 5}
    lines = [
        batch_line(body={"max_tokens": 8, "max_completion_tokens": 9, "temperature": 0, "stop": "\n", "n": 1}),
        batch_line(body={"messages": parts, "presence_penalty": 0.5, "logit_bias": {"17": -100}}),
        json.dumps({"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": response}),
    ]

    rows = read(write(tmp_path, "q.jsonl", "\n".join(lines)))

    assert rows == [
        ParsedRow(1, "a", "Who?", {"max_tokens": 9, "temperature": 0.0, "stop": ["\n"]}),
        ParsedRow(2, "a", "Who\nis?", {"presence_penalty": 0.5, "logit_bias": {"17": -100.0}}),
        ParsedRow(3, "r", "What?", {"max_tokens": 5}),
    ]


def test_what_a_batch_line_spells_out_but_does_not_change_is_accepted(tmp_path: Path) -> None:
    harmless = {
        "n": 1,
        "stream": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "instructions": None,
    }

    assert read(write(tmp_path, "q.jsonl", batch_line(body=harmless))) == [ParsedRow(1, "a", "Who?", {})]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"url": "/v1/embeddings"}, "url_mismatch"),
        ({"url": {}}, "url_mismatch"),
        ({"method": "GET"}, "method_mismatch"),
        ({"body": {"messages": []}}, "missing_question"),
        ({"body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}, "unsupported_content"),
        ({"body": {"n": 2}}, "unsupported_parameter"),
        ({"body": {"tools": [{}]}}, "unsupported_parameter"),
        ({"body": {"tool_choice": "required"}}, "unsupported_parameter"),
        ({"body": {"instructions": "Be brief."}}, "unsupported_parameter"),
        ({"body": {"top_p": 0}}, "bad_option"),
        ({"body": {"frequency_penalty": 3}}, "bad_option"),
    ],
)
def test_what_a_batch_line_asks_in_vain_is_a_fault(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    rows = read(write(tmp_path, "q.jsonl", batch_line(**changes)))

    assert [(row.code, row.custom_id) for row in rows if isinstance(row, RowFault)] == [(code, "a")]


# What every format can carry: text that is more than white space, without what PostgreSQL refuses. Carriage returns
# are left out because CSV readers may take them for line ends.
ASKABLE = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), min_size=1, max_size=30
).filter(str.strip)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(ASKABLE, min_size=1, max_size=5), delimiter=st.sampled_from([",", "\t"]))
def test_what_is_written_is_read(tmp_path: Path, asked: list[str], delimiter: str) -> None:
    as_csv = io.StringIO()
    writer = csv.writer(as_csv, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([["question"], *([question] for question in asked)])
    as_jsonl = "".join(json.dumps({"question": question}) + "\n" for question in asked)
    expected = [question.strip() for question in asked]

    for name, content in (("q.jsonl", as_jsonl), ("q.csv" if delimiter == "," else "q.tsv", as_csv.getvalue())):
        assert [text for _, text in questions(read(write(tmp_path, name, content)))] == expected


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(min_size=1, max_size=200), name=st.sampled_from(["q.jsonl", "q.csv", "q.tsv", "q.txt"]))
def test_no_bytes_break_a_reader(tmp_path: Path, content: bytes, name: str) -> None:
    """Whatever stands in a file, the outcome is rows, faults with distinct lines, or an error of ours."""
    try:
        rows = read(write(tmp_path, name, content))
    except InputError:
        return

    lines = [row.line for row in rows]
    assert len(set(lines)) == len(lines)
    assert all(line >= 1 for line in lines)
