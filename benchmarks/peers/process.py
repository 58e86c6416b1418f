"""A peer's process, seen from the harness."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.protocol import Answers, Load, Prompt, Ready, answers_of

#: Seconds that a peer may take to leave once its input has ended.
GRACE_S = 20.0
#: Where `benchmarks` and `ragspec` are imported from.
ROOT = Path(__file__).parents[2]


class PeerError(Exception):
    """A peer cannot go on; the message is the reason that the table shows."""


class PeerProcess:
    """Starts with the constructor, ends with the `with` block, whatever state the peer is in.

    Args:
        command: what to run; speaks `protocol`.
        log: gets the peer's standard error, appended.
        threads: what OMP_NUM_THREADS says to it.
        timeout_s: longest that it may take for one answer of the protocol.
    """

    def __init__(self, command: Sequence[str], log: Path, threads: int, timeout_s: float) -> None:
        self._log = log
        self._start = log.stat().st_size if log.exists() else 0
        self._timeout_s = timeout_s
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env=_environment(os.environ, threads),
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the peer and all that it started."""
        with contextlib.suppress(OSError):  # it may be gone already, with a message to it unsent
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if error else GRACE_S)
        self._kill()
        self._process.wait()
        self._output.close()

    def load(self, load: Load) -> Ready:
        """Get the peer ready.

        Raises:
            PeerError: it failed.
        """
        return Ready(**self._ask(asdict(load)))

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Answers:
        """Have all prompts answered.

        Raises:
            PeerError: it failed.
        """
        return answers_of(self._ask({"prompts": [asdict(prompt) for prompt in prompts], "max_tokens": max_tokens}))

    @property
    def _input(self) -> Any:
        return self._process.stdin

    @property
    def _output(self) -> Any:
        return self._process.stdout

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(self._timeout_s, give_up)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the missing answer says so
                self._input.write(json.dumps(message) + "\n")
                self._input.flush()
            line = self._output.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise PeerError(f"no answer within {self._timeout_s:.0f} s")
        if not line:
            raise PeerError(self._reason())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        text = self._log.read_bytes()[self._start :].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # A traceback's last line names the error; libraries may log behind it.
        errors = [line for line in lines if "Error" in line.split(":")[0]]
        status = self._process.returncode
        return (errors or lines or [f"exit status {status}"])[-1][:200]

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _environment(ours: Mapping[str, str], threads: int) -> dict[str, str]:
    # Not PYTHONPATH, VIRTUAL_ENV and the like: they would lead a peer out of its own environment.
    kept = {name: value for name, value in ours.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"}
    return kept | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
