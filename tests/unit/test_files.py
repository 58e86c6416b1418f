"""What is found under named paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragspec.corpus.files import find_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    for name in ("a.md", "sub/b.TXT", "sub/deep/c.html", ".hidden.md", ".git/d.md", "picture.png"):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
    return root


def test_a_folder_gives_all_known_files_below_it_but_hidden_ones(folder: Path) -> None:
    found = find_files([str(folder)])

    assert [file.document for file in found.files] == ["docs/a.md", "docs/sub/b.TXT", "docs/sub/deep/c.html"]
    assert (found.unknown, found.failures) == (1, [])


def test_a_glob_crosses_folders(folder: Path) -> None:
    found = find_files([f"{folder}/**/*.html"])

    assert [folder / "sub/deep/c.html"] == [file.path for file in found.files]


def test_a_file_named_twice_is_found_once(folder: Path) -> None:
    assert len(find_files([str(folder / "a.md"), str(folder)]).files) == 3


def test_a_loop_of_links_ends(folder: Path) -> None:
    (folder / "sub" / "loop").symlink_to(folder, target_is_directory=True)

    assert len(find_files([str(folder)]).files) == 3


def test_a_link_to_a_folder_elsewhere_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "e.md").write_text("text")
    (folder / "linked").symlink_to(tmp_path / "other", target_is_directory=True)

    assert "docs/linked/e.md" in [file.document for file in find_files([str(folder)]).files]


def test_a_missing_path_and_an_unknown_format_are_reported_by_code(folder: Path) -> None:
    found = find_files([str(folder / "nowhere"), str(folder / "picture.png"), f"{folder}/*.rtf"])

    assert [failure.code for failure in found.failures] == ["no_such_file", "unsupported_format", "no_such_file"]


def test_a_pipe_and_a_broken_link_are_reported_and_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    (folder / "broken.md").symlink_to(folder / "nowhere.md")

    found = find_files([str(folder)])

    assert len(found.files) == 3
    assert {failure.code for failure in found.failures} == {"unreadable_file"}
