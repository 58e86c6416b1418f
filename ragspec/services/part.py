"""What `ragspec up` runs: one part is one process, how to start it, how to ask whether it is well, how to stop it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ragspec.services.account import Account

#: Asks a part, given the id of its process, how it is: None when it is well, else what it is waiting for.
Probe = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class Part:
    """One process, described before it runs.

    Attributes:
        name: what people call it; the log is named after it.
        command: program and arguments; no shell.
        log: the file that its output is appended to.
        probe: how to ask whether it is well.
        url: where it is reached, credentials included, or empty.
        environment: variables on top of the supervisor's own.
        folder: its working directory; None keeps the supervisor's.
        account: the account it runs under; None keeps the supervisor's.
        stop_signal: asks it to finish in its own time.
        stop_timeout: seconds it has for that before SIGKILL.
        death_signal: what the kernel sends it when the supervisor is gone without a word (Linux).
        start_timeout: seconds until it has to be well.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    probe: Probe
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    account: Account | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout: float = 10.0
    death_signal: signal.Signals = signal.SIGKILL
    start_timeout: float = 60.0
