"""A row of a question file, good or bad. This file imports neither torch nor SQLAlchemy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """A row that can be asked.

    Attributes:
        line: where it starts in the file, from 1; for Parquet its row, from 1.
        custom_id: the user's name for it, or `row-000001` made of its line.
        text: the question, without surrounding white space.
        row_options: a `RowOptions` dump without its unset fields.
    """

    line: int
    custom_id: str
    text: str
    row_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that cannot be asked.

    Attributes:
        line: as `ParsedRow.line`.
        code: for machines.
        message: one sentence, without the line.
        advice: what to do about it, or empty.
        custom_id: the row's own id, where it could be read.
    """

    line: int
    code: str
    message: str
    advice: str = ""
    custom_id: str | None = None

    def __str__(self) -> str:
        return f"line {self.line}: [{self.code}] {self.message} {self.advice}".rstrip()
