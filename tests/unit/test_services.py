"""The parts of `ragspec up`, without any service."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ragspec.errors import ServiceUnavailableError, SettingsError
from ragspec.services import home as home_module
from ragspec.services import postgres
from ragspec.services.account import unprivileged_account
from ragspec.services.child import await_health, start, stop
from ragspec.services.flower import flower_part
from ragspec.services.home import prepare_home, worker_report
from ragspec.services.interrupts import Interrupts
from ragspec.services.part import Part
from ragspec.services.ports import LOOPBACK, choose_port, free_port, is_taken
from ragspec.services.secret import write_secret
from ragspec.services.worker import probe_worker, require_ready_worker
from ragspec.settings import Settings


def part(log: Path, program: str, *, well: bool = False, start_timeout: float = 30) -> Part:
    command = (sys.executable, "-c", program)
    return Part("clock", command, log, lambda _: None if well else "winding up", start_timeout=start_timeout)


def test_a_part_that_ends_while_it_starts_is_reported_with_its_last_words(tmp_path: Path) -> None:
    child = start(part(tmp_path / "log", "raise SystemExit('the spring broke')"))

    with pytest.raises(ServiceUnavailableError, match=r"clock ended with status 1 (.|\n)*the spring broke"):
        await_health(child)


def test_a_part_that_ends_over_a_setting_makes_the_status_of_a_wrong_setting(tmp_path: Path) -> None:
    child = start(part(tmp_path / "log", "import sys; print('RAGSPEC_HEAD is wrong'); sys.exit(78)"))

    with pytest.raises(SettingsError, match=r"clock ended with status 78 (.|\n)*RAGSPEC_HEAD is wrong") as caught:
        await_health(child)

    assert caught.value.error_code == "not_started"


def test_a_part_that_is_never_well_says_what_it_waits_for(tmp_path: Path) -> None:
    child = start(part(tmp_path / "log", "import time; time.sleep(60)", start_timeout=0.1))
    try:
        with pytest.raises(ServiceUnavailableError, match="clock is not well after 0 s: winding up"):
            await_health(child)
    finally:
        stop(child)


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailableError, match=r"clock cannot be started: .*no-such-program"):
        start(Part("clock", ("/no-such-program",), tmp_path / "log", lambda _: None))


def test_stopping_a_part_ends_what_it_started(tmp_path: Path) -> None:
    """Also when the part itself is gone before."""
    program = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\nsys.stdin.close()"
    child = start(part(tmp_path / "log", program))
    while child.running:
        pass
    grandchild = int((tmp_path / "log").read_text())
    assert psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE

    stop(child)

    _, alive = psutil.wait_procs([psutil.Process(grandchild)] if psutil.pid_exists(grandchild) else [], timeout=10)
    assert alive == []


def test_a_part_deaf_to_its_stop_signal_is_killed_when_hurried(tmp_path: Path) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    child = start(part(tmp_path / "log", program))
    while "deaf" not in child.last_words():
        pass

    stop(child, hurried=lambda: True)

    assert child.fate() == "was killed by SIGKILL"


def test_requests_to_stop_are_counted_and_wake_the_wait() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        interrupts.wait(60)
        once = interrupts.stopping, interrupts.hurried
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.wait(60)

        assert once == (True, False)
        assert interrupts.hurried


def test_a_full_disk_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=3_000_000))

    with pytest.raises(ServiceUnavailableError, match=r"RAGSPEC_HOME=.* is full: 3 MB are free") as caught:
        prepare_home(tmp_path / "home")

    assert caught.value.error_code == "disk_full"


def test_a_write_that_finds_the_disk_full_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailableError) as caught, home_module.speaking_of(tmp_path):
        raise OSError(28, "No space left on device", "x")

    assert caught.value.error_code == "disk_full"


def test_a_secret_is_its_owners_alone(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", "one")
    write_secret(tmp_path / "secret", "two")

    assert (tmp_path / "secret").read_text() == "two"
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("part", ["flower", "gateway"])
def test_a_part_moves_on_from_a_taken_default_port_and_says_so(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"RAGSPEC_{part.upper()}_PORT", raising=False)
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        settings = Settings.model_construct(set(), **{f"{part}_port": port})

        chosen, remark = choose_port(settings, part)

    assert chosen != port
    assert f"port {port} is taken" in remark
    assert not is_taken(chosen)


def test_flower_shows_arguments_and_keeps_its_password_off_the_command_line(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, flower_password="hunter2")

    flower = flower_part(settings, free_port(), tmp_path / "log", {})
    again = flower_part(settings, free_port(), tmp_path / "log", {})

    columns = next(word for word in flower.command if word.startswith("--tasks_columns="))
    assert {"args", "kwargs", "result"} < set(columns.partition("=")[2].split(","))
    assert not any("hunter2" in word for word in flower.command)
    assert flower.environment["FLOWER_BASIC_AUTH"] == "ragspec:hunter2"
    assert flower.environment["FLOWER_COOKIE_SECRET"] == again.environment["FLOWER_COOKIE_SECRET"]


def test_a_worker_is_well_once_it_says_ready(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    says = worker_report(tmp_path, 7)
    before = probe_worker(tmp_path, 7)
    says.write_text('{"state": "starting", "model": "smol"}')
    during = probe_worker(tmp_path, 7)
    says.write_text('{"state": "ready", "model": "smol"}')

    assert (before, during, probe_worker(tmp_path, 7)) == ("starting", "loading the model smol", None)


def test_a_worker_elsewhere_with_the_same_process_id_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    worker_report(tmp_path, 7).write_text('{"state": "ready"}')

    monkeypatch.setattr("platform.node", lambda: "elsewhere")

    assert probe_worker(tmp_path, 7) == "starting"
    with pytest.raises(ServiceUnavailableError, match="none runs"):
        require_ready_worker(tmp_path)


def test_a_silent_worker_does_not_count_as_ready(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    says = worker_report(tmp_path, 7)
    says.write_text('{"state": "ready"}')
    require_ready_worker(tmp_path)

    os.utime(says, (0, 0))

    with pytest.raises(ServiceUnavailableError, match="process 7: silent for"):
        require_ready_worker(tmp_path)


def test_a_cluster_of_another_version_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PG_VERSION").write_text("9.6\n")

    with pytest.raises(ServiceUnavailableError, match=r"made by PostgreSQL 9\.6; here there is only") as caught:
        postgres._find_binaries(tmp_path / "data")

    assert caught.value.error_code == "postgres_version"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account for PostgreSQL")
def test_a_home_out_of_the_accounts_reach_gets_its_cluster_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/root` stays shut: the cluster moves, and the home points to it; a second call finds it again."""
    account = unprivileged_account()
    assert account
    shut = tmp_path / "shut"
    (shut / "home" / "postgres").mkdir(parents=True)
    shut.chmod(0o700)
    monkeypatch.setattr(postgres, "_SHARED_STATE", Path("/tmp") / f"ragspec-test-{os.getpid()}")
    try:
        first = postgres._make_reachable(shut / "home" / "postgres", account)
        (first / "data").mkdir()
        second = postgres._make_reachable(shut / "home" / "postgres", account)

        assert first == second
        assert (shut / "home" / "postgres" / "data").is_dir()
        assert shut.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(postgres._SHARED_STATE)
