"""A flag that `select` wakes for."""

from __future__ import annotations

import os
import select


class Flag:
    """Set once, and seen by every thread that has it and every process forked after it was made.

    It is a pipe into which one byte is written that nobody reads, so that it stays readable: no lock is shared that a killed
    process could keep, and no signal cuts what somebody is at.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        """Readable once the flag is set."""
        return self._read

    def set(self) -> None:
        """Set it; safe in a signal handler."""
        os.write(self._write, b"x")

    def is_set(self) -> bool:
        """Whether it is set."""
        return bool(select.select([self._read], [], [], 0)[0])

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._read)
        os.close(self._write)
