"""What must not be trained on, because it is measured on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ragspec.errors import InputError

#: Words that two texts share in a row where one is taken from the other.
SHARED = 8


class Exclusion:
    """Knows texts again by `SHARED` words in a row, whatever their case and punctuation.

    Args:
        texts: what is excluded. One of fewer words excludes only itself.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._runs = {run for text in texts for run in _runs(text)}

    def __contains__(self, text: object) -> bool:
        """Whether a text shares a run of words with what is excluded."""
        return isinstance(text, str) and not self._runs.isdisjoint(_runs(text))


def read_exclusion(paths: Iterable[Path]) -> Exclusion:
    """Every string in files of JSON (`.json`) and JSON Lines (`.jsonl`), and the whole text of any other.

    Raises:
        InputError: a file is not UTF-8, or not the JSON that its name says (code `unreadable_file`).
    """
    return Exclusion(text for path in paths for text in _texts(path))


def _texts(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            yield from _strings([json.loads(line) for line in text.splitlines() if line.strip()])
        elif path.suffix == ".json":
            yield from _strings(json.loads(text))
        else:
            yield text
    except (OSError, ValueError) as error:
        msg = f"{path}, which is to be excluded, cannot be read: {error}"
        raise InputError(msg, "Give UTF-8 text, JSON or JSON Lines.", code="unreadable_file") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    if not words:
        return set()
    return {tuple(words[start : start + SHARED]) for start in range(max(1, len(words) - SHARED + 1))}
