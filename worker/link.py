"""A client's end of the connection to the resident process. This file imports no torch."""

from __future__ import annotations

import socket
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from ragspec.errors import ServiceUnavailableError
from worker.protocol import VERSION, Frame, FrameBuffer, Hello, ProtocolError, encode

#: Seconds that one write may block: the resident reads at once unless it is stuck.
WRITE_TIMEOUT_S = 30.0
READ_SIZE = 1 << 18


class EngineLostError(ServiceUnavailableError):
    """The resident process is not there, went away, or spoke nonsense."""

    code = "engine_lost"


class Link:
    """A connection that has been greeted; not for use by several threads."""

    def __init__(self, path: Path, timeout: float) -> None:
        """Connect and wait for the greeting.

        Args:
            path: the resident's socket.
            timeout: seconds to wait for both.

        Raises:
            EngineLostError: nobody listens, or it does not greet in time, or speaks another version.
        """
        self._buffer = FrameBuffer()
        self._ready: deque[Frame] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(path))
            hello = self._greeting(time.monotonic() + timeout)
        except OSError as error:
            self.close()
            raise EngineLostError(f"The engine does not answer at {path}: {error}.") from error
        except EngineLostError:
            self.close()
            raise
        self.model = hello.model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up; the resident drops what this link still waits for."""
        self._socket.close()

    def send(self, *frames: Frame) -> None:
        """Write frames.

        Raises:
            EngineLostError: the resident is gone or does not read.
        """
        try:
            self._socket.settimeout(WRITE_TIMEOUT_S)
            self._socket.sendall(b"".join(map(encode, frames)))
        except OSError as error:
            raise EngineLostError(f"The engine went away: {error}.") from error

    def read(self, timeout: float | None = None) -> list[Frame]:
        """The frames that have arrived, [] where none is complete yet.

        Args:
            timeout: seconds to wait for the first byte, 0 not to; call without after `select` said there is one.

        Raises:
            EngineLostError: the resident hung up or sent nonsense.
        """
        if self._ready:
            frames = list(self._ready)
            self._ready.clear()
            return frames
        try:
            self._socket.settimeout(timeout)
            data = self._socket.recv(READ_SIZE)
            if not data:
                raise EngineLostError("The engine hung up.")
            return list(self._buffer.feed(data))
        except (TimeoutError, BlockingIOError):  # the latter where the timeout is 0
            return []
        except (OSError, ProtocolError) as error:
            raise EngineLostError(f"The engine went away: {error}.") from error

    def _greeting(self, deadline: float) -> Hello:
        while (left := deadline - time.monotonic()) > 0:
            frames = self.read(left)
            if not frames:
                continue
            hello, *rest = frames
            if not isinstance(hello, Hello) or hello.version != VERSION:
                raise EngineLostError(
                    f"The engine greets with {hello.kind}, not with version {VERSION} of our protocol.",
                    "Restart the worker: it runs two versions of ragspec at once.",
                )
            self._ready.extend(rest)
            return hello
        raise EngineLostError("The engine does not greet.")
