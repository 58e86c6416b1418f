"""One place where a model was looked for in vain."""

from __future__ import annotations


class NotHereError(Exception):
    """A place that does not have the model; the message says why, and the next place is tried."""
