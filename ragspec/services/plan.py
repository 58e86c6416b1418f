"""Which parts run here, given the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ragspec.services.beat import beat_part
from ragspec.services.chroma import chroma_part, probe_chroma
from ragspec.services.flower import flower_part
from ragspec.services.gateway import gateway_part
from ragspec.services.home import log_of
from ragspec.services.part import Part
from ragspec.services.postgres import postgres_part, probe_postgres
from ragspec.services.redis import probe_redis, redis_part
from ragspec.services.worker import worker_part
from ragspec.settings import PREFIX, Settings, child_environment


@dataclass(frozen=True, slots=True)
class Configured:
    """A store that somebody else runs, named by a setting.

    Attributes:
        variable: the setting's name.
        url: its address, credentials included.
        probe: None if it answers, else what it says.
    """

    variable: str
    url: str
    probe: Callable[[str], str | None]


def plan_stores(settings: Settings) -> dict[str, Part | Configured]:
    """For each of the settings `redis_url`, `database_url`, `chroma_url`: the embedded store, or the configured one."""
    home = settings.home
    choices: dict[str, tuple[Callable[[], Part], Callable[[str], str | None]]] = {
        "redis_url": (lambda: redis_part(home / "redis", log_of(home, "redis")), probe_redis),
        "database_url": (lambda: postgres_part(home / "postgres", log_of(home, "postgres")), probe_postgres),
        "chroma_url": (lambda: chroma_part(home / "chroma", log_of(home, "chroma")), probe_chroma),
    }
    return {
        field: Configured(PREFIX + field.upper(), url.get_secret_value(), probe)
        if (url := getattr(settings, field)) is not None
        else embedded()
        for field, (embedded, probe) in choices.items()
    }


def plan_workers(
    settings: Settings, urls: dict[str, str], *, with_worker: bool, ports: Mapping[str, int]
) -> list[Part]:
    """Worker, beat, Flower and gateway on the stores at `urls` (setting name to address); who has no port is left out."""
    home = settings.home
    environment = child_environment(home=home, **urls)
    parts = []
    if with_worker:
        parts += [
            worker_part(settings, log_of(home, "worker"), environment),
            beat_part(log_of(home, "beat"), environment),
        ]
    if "flower" in ports:
        parts.append(flower_part(settings, ports["flower"], log_of(home, "flower"), environment))
    if "gateway" in ports:
        parts.append(gateway_part(ports["gateway"], log_of(home, "gateway"), environment))
    return parts
