"""TCP ports of the loopback interface."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def is_taken(port: int) -> bool:
    """Whether something listens on `port`."""
    with socket.socket() as listener:
        # As servers do, so that a port whose connections only linger counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return True
        return False
