"""Passages of a JSONL file, and its bad lines."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from ragspec.corpus.jsonl import BadLine, GivenPassage, read_passages
from ragspec.errors import InputError
from ragspec.streams import MAX_LINE_BYTES


def test_a_passage_keeps_its_id_and_all_its_row_says(tmp_path: Path) -> None:
    file = tmp_path / "passages.jsonl.gz"
    row = {"id": 7, "text": "Thirty days.", "title": "Leave", "metadata": {"tags": ["a"]}, "url": "x"}
    file.write_bytes(gzip.compress(json.dumps(row).encode() + b"\n\n"))

    assert [GivenPassage(1, "7", "Thirty days.", "Leave", {"url": "x", "tags": ["a"]})] == list(read_passages(file))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b'{"text": "x"}', "bad_passage"),
        (b'{"id": true, "text": "x"}', "bad_passage"),
        (b'{"id": "a", "text": " "}', "bad_passage"),
        (b'{"id": "a", "text": "x", "title": 1}', "bad_passage"),
        (b'{"id": "a", "text": "x", "metadata": []}', "bad_passage"),
        (b'{"id": "a", "text": "\\ud800"}', "bad_passage"),
        (b'{"id": "a", "text": "x", "metadata": {"k": ["\\ud800"]}}', "bad_passage"),
        (b'{"id": "a", "text": "x", "\\ud800": 1}', "bad_passage"),
        (b'{"id": "a", "text": "\xff"}', "not_utf8"),
    ],
)
def test_a_bad_line_is_named_and_the_next_is_read(tmp_path: Path, line: bytes, code: str) -> None:
    file = tmp_path / "passages.jsonl"
    file.write_bytes(line + b'\n{"id": "b", "text": "x"}\n')

    bad, good = read_passages(file)

    assert isinstance(bad, BadLine)
    assert (1, code) == (bad.line, bad.error.error_code)
    assert GivenPassage(2, "b", "x", "", {}) == good


def test_an_endless_line_is_named_with_the_limit_and_never_held_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "passages.jsonl.gz"
    with gzip.open(file, "wb") as stream:
        for _ in range(64):
            stream.write(b"x" * 2**20)
        stream.write(b'\n{"id": "b", "text": "x"}\n')

    tracemalloc.start()
    bad, good = read_passages(file)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert isinstance(bad, BadLine)
    assert (bad.line, bad.error.error_code) == (1, "line_too_long")
    assert f"more than {MAX_LINE_BYTES} bytes" in bad.error.message
    assert GivenPassage(2, "b", "x", "", {}) == good
    assert most < 4 * MAX_LINE_BYTES


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_as_long_as_the_limit_is_read_and_none_a_byte_longer(tmp_path: Path, end: bytes) -> None:
    file = tmp_path / "passages.jsonl"
    line = b'{"id": "a", "text": "%s"}'
    room = MAX_LINE_BYTES - len(line % b"")
    read = []
    for size in (room, room + 1):
        file.write_bytes(line % (b"x" * size) + end)
        read += read_passages(file)

    fits, exceeds = read

    assert isinstance(fits, GivenPassage)
    assert isinstance(exceeds, BadLine)
    assert exceeds.error.error_code == "line_too_long"


@pytest.mark.parametrize("content", [b'{"id": "a", "text": "x"}\n', b"x"])
def test_a_file_that_is_called_gzip_and_is_none_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "passages.jsonl.gz"
    file.write_bytes(content)

    with pytest.raises(InputError, match="not gzip") as caught:
        list(read_passages(file))

    assert caught.value.error_code == "not_gzip"


def test_a_torn_gzip_file_gives_what_it_has_and_then_fails(tmp_path: Path) -> None:
    file = tmp_path / "passages.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"id": "a", "text": "x"}\n')[:-8])

    with pytest.raises(InputError) as caught:
        list(read_passages(file))

    assert caught.value.error_code == "unreadable_file"
