"""Why a row cannot be asked, while it is being read."""

from __future__ import annotations


class NotAskableError(ValueError):
    """A row that cannot be asked.

    Args:
        code: for machines.
        message: one sentence.
        advice: what to do about it, or empty.
    """

    def __init__(self, code: str, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.advice = advice
