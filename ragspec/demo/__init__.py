"""A corpus and questions that are at hand on every machine: the language reference topics that ship inside CPython."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics

#: The demo's collection.
COLLECTION = "python-reference"


def write_corpus(folder: Path) -> int:
    """Write one text file a topic of the Python language reference; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in topics.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return len(topics)


def questions_file() -> Path:
    """Questions over the topics: JSON Lines of `custom_id`, `question` and `passage_id`, the file that answers it."""
    return Path(str(resources.files("ragspec.demo").joinpath("questions.jsonl")))


def questions() -> list[dict[str, str]]:
    """The rows of `questions_file`."""
    return [json.loads(line) for line in questions_file().read_text(encoding="utf-8").splitlines()]
