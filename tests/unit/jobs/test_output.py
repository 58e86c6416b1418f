"""Where an export may go: a file appears whole, a link is followed, a pipe or device is written to."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ragspec.jobs.export import _output


def test_a_link_stays_a_link_to_the_new_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("old")
    link = tmp_path / "link.jsonl"
    link.symlink_to(kept)

    with _output(str(link)) as file:
        file.write(b"new")

    assert link.is_symlink()
    assert kept.read_text() == "new"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A device behaves as the pipe does here: replacing it would break the machine for root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()

    with _output(str(pipe)) as file:
        file.write(b"rows")
    reader.join()

    assert pipe.is_fifo()
    assert read == [b"rows"]
