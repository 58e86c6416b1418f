"""A RAGSPEC_HOME and the commands run in it, each as a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ragspec.services.record import ProcessId, Record, read_record
from ragspec.settings import PREFIX

BARE = ("--no-worker", "--no-flower", "--no-gateway")


class Home:
    """A folder, and the environment of the commands run in it."""

    def __init__(self, path: Path, environment: dict[str, str]) -> None:
        self.path = path
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = environment | {"RAGSPEC_HOME": str(path)}

    def set(self, **settings: str) -> None:
        """Set settings for the commands run from now on."""
        self.environment |= {PREFIX + name.upper(): value for name, value in settings.items()}

    def ragspec(self, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """As the installed script runs: without the working directory on the import path."""
        return subprocess.run(
            (sys.executable, "-P", "-m", "ragspec", *arguments),
            check=False,
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """`up` in the foreground, ready; its output goes to `out`."""
        with (self.path / "out").open("wb") as out:
            up = subprocess.Popen(
                command or (sys.executable, "-m", "ragspec", "up", *BARE),
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.started.append(up)
        until(lambda: up.poll() is not None or self.ready(up.pid))
        assert up.poll() is None, self.output()
        return up

    def ready(self, pid: int) -> bool:
        record = read_record(self.path)
        return record is not None and record.supervisor.pid == pid and record.state == "ready"

    def output(self) -> str:
        return (self.path / "out").read_text()

    def record(self) -> Record:
        record = read_record(self.path)
        assert record is not None
        return record

    def child(self, name: str) -> ProcessId:
        return next(child for child in self.record().children if child.name == name)

    def url(self, name: str) -> str:
        return str(json.loads((self.path / "run" / "services.json").read_text())[name])


@contextmanager
def temporary_home() -> Iterator[Home]:
    """A home as `mktemp -d` makes it, which nobody else may enter; nothing of it is left behind."""
    path = Path(tempfile.mkdtemp(prefix="ragspec-test-"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    home = Home(path, clean | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        yield home
    finally:
        down = home.ragspec("down")
        for up in home.started:
            up.wait(10)
        shutil.rmtree(path, ignore_errors=True)
        assert down.returncode == 0, down.stderr


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
