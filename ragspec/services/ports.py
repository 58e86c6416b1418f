"""TCP ports of the loopback interface."""

from __future__ import annotations

import socket

from ragspec.errors import ServiceUnavailableError
from ragspec.settings import PREFIX, Settings

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


def choose_port(settings: Settings, part: str) -> tuple[int, str]:
    """The port for a part that has a setting for it, `flower` or `gateway`, and a line to say about it, or empty.

    Raises:
        ServiceUnavailableError: a port was asked for by the setting and is taken (code `port_taken`).
    """
    field = f"{part}_port"
    variable = PREFIX + field.upper()
    wanted: int = getattr(settings, field)
    if wanted == 0:
        return free_port(), ""
    if not is_taken(wanted):
        return wanted, ""
    if field in settings.model_fields_set:
        raise ServiceUnavailableError(
            f"{variable}={wanted} is taken by another process.",
            f"Set it to another port, to 0 for any free one, or leave it out with --no-{part}.",
            code="port_taken",
        )
    port = free_port()
    return port, f"{part}: port {wanted} is taken, so it listens on {port}; {variable} chooses another"
