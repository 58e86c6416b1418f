"""How gateways know of workers that can answer: a field of one Redis hash for each, rewritten while it makes progress."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

#: Key of the hash; fields are workers' names.
WORKERS = "ragspec:workers"
#: Seconds after which a beat counts no more.
FRESH_S = 10.0


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker's word.

    Attributes:
        at: when, seconds since the epoch.
        model: the target's identity.
        waiting: questions in its engine's process that it does not decode yet.
        running: questions that it decodes.
    """

    at: float
    model: str
    waiting: int
    running: int

    def dump(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self))


def fresh_workers(fields: Mapping[bytes, bytes], now: float | None = None) -> dict[str, Beat]:
    """Those of the hash's fields whose beat is fresh; what is no beat is passed over."""
    now = time.time() if now is None else now
    found: dict[str, Beat] = {}
    for name, value in fields.items():
        try:
            beat = Beat(**json.loads(value))
            if now - beat.at <= FRESH_S:
                found[name.decode()] = beat
        except (ValueError, TypeError):
            continue
    return found
