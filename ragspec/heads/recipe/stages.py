"""What a folder has been through: each stage once, and only with the options it was begun with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragspec.errors import InputError

_FILE = "stages.json"


class Stages:
    """Runs stages in their order and passes over those that are complete.

    Args:
        folder: keeps the record; made if it is missing.
        options: what the result depends on (JSON values).

    Raises:
        InputError: the folder was begun with other options; they are named (code `other_recipe`).
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _FILE
        self._options = json.loads(json.dumps(options))
        self._done: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            there = json.loads(self._path.read_text(encoding="utf-8"))
            if there["options"] != self._options:
                names = {**there["options"], **self._options}
                other = [name for name in names if there["options"].get(name) != self._options.get(name)]
                msg = f"{folder} was begun with another {', another '.join(other)}."
                raise InputError(msg, "Choose another folder, or the same options to go on.", code="other_recipe")
            self._done = there["done"]
        self._write()

    @property
    def done(self) -> Mapping[str, Mapping[str, Any]]:
        """What each complete stage gave, and its `seconds` since it was last started."""
        return self._done

    def run(self, name: str, work: Callable[[], Mapping[str, Any]]) -> bool:
        """Do a stage and keep what it gives, unless it is complete already; returns whether it was done now."""
        if name in self._done:
            return False
        began = time.monotonic()
        given = dict(work())
        self._done[name] = {**given, "seconds": round(time.monotonic() - began, 1)}
        self._write()
        return True

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"options": self._options, "done": self._done}, indent=1) + "\n", encoding="utf-8")
        part.replace(self._path)
