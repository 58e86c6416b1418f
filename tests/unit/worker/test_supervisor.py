"""What the supervisor does without a working engine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ragspec.errors import ServiceUnavailableError, SettingsError
from ragspec.heads.card import CARD, shipped_heads
from ragspec.services.beat import beat_part
from ragspec.services.detach import stop_detached
from ragspec.services.home import run_folder, worker_report
from ragspec.services.preflight import check_worker
from ragspec.services.worker import forget_dead_workers, require_ready_worker, worker_part
from ragspec.settings import Settings
from worker import supervisor
from worker.child import Child
from worker.protocol import Pong
from worker.report import Report, remove, write
from worker.supervisor import NODE, RESIDENT

SUPERVISE = """
import sys
from ragspec.settings import load_settings
from worker.supervisor import run
sys.exit(run(load_settings(home=sys.argv[1]), [sys.executable, "-c", "import sys; sys.exit(69)"]))
"""


def test_an_engine_that_gives_up_at_once_ends_the_worker_with_its_status(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SUPERVISE, str(tmp_path)], check=False, capture_output=True)

    assert done.returncode == 69, done.stderr
    assert list((tmp_path / "run").iterdir()) == []
    assert b"resident: ended with status 69" in done.stderr
    assert b"again in" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RAGSPEC_HEAD": "{folder}"}, b"RAGSPEC_HEAD={folder}: {folder} holds no speculation head"),
        ({"RAGSPEC_DATABASE_URL": "postgresql://host/jobs?x=y"}, b"RAGSPEC_DATABASE_URL cannot be used"),
    ],
)
@pytest.mark.parametrize("command", [("-m", "worker"), ("-m", "ragspec", "worker"), ("-m", "ragspec", "up")])
def test_a_wrong_setting_is_named_before_anything_starts(
    command: Sequence[str], variables: dict[str, str], said: bytes, tmp_path: Path
) -> None:
    home, folder = tmp_path / "home", str(tmp_path)
    given = {name: value.replace("{folder}", folder) for name, value in variables.items()}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAGSPEC_HOME": str(home), **given}

    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, check=False, capture_output=True)

    assert done.returncode == 78, done.stderr
    assert done.stderr.startswith(b"error[bad_setting]: " + said.replace(b"{folder}", folder.encode()))
    assert done.stdout == b""
    assert not home.exists()


def test_a_detached_up_warns_of_a_misspelt_setting_once(tmp_path: Path) -> None:
    given = {"RAGSPEC_HOME": str(tmp_path / "home"), "RAGSPEC_HEAD": str(tmp_path), "RAGSPEC_STALE_AFTR": "30"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **given}
    command = [sys.executable, "-m", "ragspec", "up", "--detach"]

    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)

    assert done.returncode == 78
    assert done.stderr.startswith("warning[unknown_setting]: ")
    assert done.stdout.startswith("error[bad_setting]: RAGSPEC_HEAD=")


def test_a_wrong_head_is_no_matter_where_nothing_is_drafted(tmp_path: Path) -> None:
    check_worker(Settings(head=str(tmp_path), max_draft=0))
    with pytest.raises(SettingsError, match="RAGSPEC_HEAD"):
        check_worker(Settings(head=str(tmp_path)))


def test_a_head_whose_weights_are_missing_is_found_out_without_torch(tmp_path: Path) -> None:
    shutil.copy(shipped_heads()[0] / CARD, tmp_path)
    code = """
import sys
from ragspec.errors import SettingsError
from ragspec.services.preflight import check_worker
from ragspec.settings import load_settings
try:
    check_worker(load_settings(head=sys.argv[1]))
except SettingsError as error:
    assert "head.safetensors" in error.message and "torch" not in sys.modules
    print("found")
"""

    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True)

    assert done.stdout == b"found\n", done.stderr


def test_the_engines_socket_lies_in_a_folder_of_the_workers_own(tmp_path: Path) -> None:
    """Another container may share the home and have the same process id."""
    home = tmp_path / "home"
    tell = "import pathlib, sys; f = pathlib.Path(sys.argv[1][9:]).parent; sys.exit(f'{f} {f.stat().st_mode:o}')"
    code = SUPERVISE.replace("import sys; sys.exit(69)", tell)

    done = subprocess.run([sys.executable, "-c", code, str(home)], check=False, capture_output=True, text=True)

    folder, mode = done.stderr.splitlines()[0].split()
    assert mode == "40700"
    assert not Path(folder).exists()
    assert home not in Path(folder).parents


@pytest.mark.parametrize(
    "command",
    [
        worker_part(Settings(), Path("log"), {}).command,
        beat_part(Path("log"), {}).command,
        (*NODE, "--queue=bulk", "--concurrency=1", "--name=n", f"--parent={os.getpid()}"),
        (*RESIDENT, "--socket=engine.sock", f"--parent={os.getpid()}"),
    ],
    ids=["worker", "beat", "node", "resident"],
)
def test_folders_in_the_working_directory_are_not_taken_for_ours(command: Sequence[str], tmp_path: Path) -> None:
    """Each ends at a wrong setting, which only our own code names."""
    for package in ("worker", "producer", "ragspec", "migrations"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('not ours')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAGSPEC_DEVICE": "abacus"}

    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)

    assert "RAGSPEC_DEVICE='abacus'" in done.stderr


def test_a_child_that_ends_is_started_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("worker.child.time.monotonic", lambda: clock[0])
    child = Child("one", [sys.executable, "-c", "raise SystemExit(3)"], {})
    child.start()
    child._process.wait()

    assert child.ended() == 3
    child.schedule()
    assert child.ended() is None
    assert not child.start_if_due()
    clock[0] += 0.6
    assert child.start_if_due()
    child._process.wait()
    assert child.ended() == 3
    child.schedule()
    clock[0] += 0.6
    assert not child.start_if_due()  # the second pause is longer
    clock[0] += 0.6
    assert child.start_if_due()
    child._process.wait()


def test_a_report_comes_and_goes(tmp_path: Path) -> None:
    run_folder(tmp_path).mkdir()
    write(tmp_path, Report(7, "ready", "/run/engine.sock", "model@1", 12, 1.5))

    assert '"state": "ready"' in worker_report(tmp_path, 7).read_text()
    remove(tmp_path, 7)
    remove(tmp_path, 7)
    assert list(run_folder(tmp_path).iterdir()) == []


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """One whose path has room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="ragspec-", dir="/tmp") as folder:
        yield Path(folder)


def test_what_a_killed_worker_left_is_taken_away_and_a_living_ones_stays(tmp_path: Path, short_folder: Path) -> None:
    """Also where its process id is another's by now."""
    run_folder(tmp_path).mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    told_at = {
        "ragspec-dead": (ended.pid, time.time()),
        "ragspec-reused": (os.getppid(), 1.0),
        "ragspec-alive": (os.getpid(), time.time()),
    }
    for name, (pid, updated_at) in told_at.items():
        (short_folder / name).mkdir()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(short_folder / name / "engine.sock"))
        said = Report(pid, "ready", str(short_folder / name / "engine.sock"), "model@1", 12, updated_at)
        write(tmp_path, said)

    forget_dead_workers(tmp_path)

    assert [path.name for path in short_folder.iterdir()] == ["ragspec-alive"]
    assert list(run_folder(tmp_path).iterdir()) == [worker_report(tmp_path, os.getpid())]
    assert (short_folder / "ragspec-alive" / "engine.sock").exists()


@pytest.mark.parametrize(("folder", "content"), [("ragspec-ours", "kept"), ("theirs", None)])
def test_a_file_that_is_no_socket_and_a_folder_not_called_as_ours_are_left_alone_whatever_a_report_says(
    tmp_path: Path, folder: str, content: str | None
) -> None:
    run_folder(tmp_path).mkdir()
    precious = tmp_path / folder / "precious"
    precious.parent.mkdir()
    if content:
        precious.write_text(content)
    write(tmp_path, Report(os.getppid(), "ready", str(precious), "model@1", 12, 1.0))

    forget_dead_workers(tmp_path)

    assert precious.parent.exists()
    assert precious.exists() == bool(content)
    assert not worker_report(tmp_path, os.getppid()).exists()


def test_workers_of_a_host_whose_name_begins_like_this_ones_are_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers that share a home may be called `gpu` and `gpu-2`."""
    run_folder(tmp_path).mkdir()
    monkeypatch.setattr("platform.node", lambda: "gpu-2")
    write(tmp_path, Report(os.getppid(), "ready", "/nowhere/engine.sock", "model@1", 12, 1.0))
    theirs = worker_report(tmp_path, os.getppid())
    monkeypatch.setattr("platform.node", lambda: "gpu")

    forget_dead_workers(tmp_path)

    assert theirs.exists()
    with pytest.raises(ServiceUnavailableError, match="none runs"):
        require_ready_worker(tmp_path)


def test_a_worker_that_starts_takes_away_what_a_killed_one_left(tmp_path: Path) -> None:
    run_folder(tmp_path).mkdir()
    write(tmp_path, Report(os.getppid(), "ready", "/nowhere/engine.sock", "model@1", 12, 1.0))

    subprocess.run([sys.executable, "-c", SUPERVISE, str(tmp_path)], check=False, capture_output=True)

    assert list(run_folder(tmp_path).iterdir()) == []


def test_down_takes_away_what_a_killed_worker_left(tmp_path: Path) -> None:
    run_folder(tmp_path).mkdir()
    write(tmp_path, Report(os.getppid(), "ready", "/nowhere/engine.sock", "model@1", 12, 1.0))
    said: list[str] = []

    stop_detached(tmp_path, said.append)

    assert list(run_folder(tmp_path).iterdir()) == []
    assert said == [f"Nothing runs in {tmp_path}."]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_process_whose_parent_is_gone_already_does_not_start() -> None:
    code = "from worker.lifeline import die_with; die_with(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)

    assert (done.returncode, done.stdout) == (-9, b"")


class SilentLink:
    """A connection to a frozen process: it takes what is sent and never answers, until it is told to."""

    model = "frozen"

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.pongs: list[Pong] = []

    def send(self, *frames: object) -> None:
        self.sent += frames

    def read(self, timeout: float) -> list[Pong]:
        answered, self.pongs = self.pongs, []
        return answered

    def close(self) -> None: ...


def test_a_frozen_engine_gets_one_ping_and_is_found_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second ping to a process that reads nothing would in the end fill the socket and block the supervisor itself."""
    link = SilentLink()
    clock = [1000.0]
    monkeypatch.setattr(supervisor, "Link", lambda *_, **__: link)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    watch = supervisor._Watch(tmp_path / "engine.sock", timeout=120)
    for _ in range(119):
        assert watch.look() is None
        clock[0] += 1

    assert len(link.sent) == 1
    assert not watch.hung
    clock[0] += 2
    assert watch.hung

    link.pongs = [Pong(steps=1, waiting=0, running=0, stalled_s=0.0)]
    assert watch.look() is not None
    clock[0] += 1
    watch.look()

    assert not watch.hung
    assert len(link.sent) == 2
