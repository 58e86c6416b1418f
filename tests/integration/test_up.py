"""`ragspec up` and `ragspec down` with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest
import redis

from ragspec.services.ports import is_taken
from ragspec.services.record import ProcessId, Record, read_record
from tests.integration.home import BARE, Home, temporary_home, until

pytestmark = pytest.mark.services


@pytest.fixture
def home() -> Iterator[Home]:
    with temporary_home() as home:
        yield home


@pytest.fixture
def light_home(home: Home, database_url: str, chroma_url: str) -> Home:
    """A home whose only embedded store is Redis."""
    home.environment |= {"RAGSPEC_DATABASE_URL": database_url, "RAGSPEC_CHROMA_URL": chroma_url}
    return home


def test_up_detach_serves_all_stores_and_down_ends_every_process(home: Home) -> None:
    """Up in a private folder, migrated, then gone."""
    up = home.ragspec("up", "--detach", *BARE)
    assert up.returncode == 0, up.stdout + up.stderr
    with psycopg.connect(home.url("database_url")) as connection:
        tables = connection.execute("SELECT count(*) FROM answers").fetchone()
    processes = [home.record().supervisor, *home.record().children]

    down = home.ragspec("down")

    assert tables == (0,)
    assert {process.name for process in processes} == {"ragspec up", "redis", "postgres", "chroma"}
    assert down.returncode == 0, down.stderr
    assert [process.name for process in processes if process.find()] == []
    assert not (home.path / "run" / "services.json").exists()
    assert "Nothing runs" in home.ragspec("down").stdout


def test_up_detach_runs_beside_folders_named_like_ours(light_home: Home, tmp_path: Path) -> None:
    for package in ("worker", "producer", "ragspec"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('not ours')")
    light_home.environment["RAGSPEC_FLOWER_PORT"] = "0"

    up = light_home.ragspec("up", "--detach", "--no-worker", folder=tmp_path)

    assert up.returncode == 0, up.stdout + up.stderr
    assert "flower: well" in up.stdout


def test_what_up_keeps_is_private_and_lasts(home: Home) -> None:
    """Data outlives a restart; addresses with passwords are the owner's alone; no password is printed."""
    assert home.ragspec("up", "--detach", *BARE).returncode == 0
    with psycopg.connect(home.url("database_url")) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
    assert home.ragspec("down").returncode == 0

    again = home.ragspec("up", "--detach", *BARE)

    with psycopg.connect(home.url("database_url")) as connection:
        kept = connection.execute("SELECT one FROM kept").fetchone()
    secrets = [psycopg.conninfo.conninfo_to_dict(home.url("database_url"))["password"], home.url("redis_url")]
    assert kept == (1,)
    assert (home.path / "run" / "services.json").stat().st_mode & 0o077 == 0
    assert not any(str(secret) in again.stdout for secret in secrets)


def test_a_configured_store_is_used_and_not_started(light_home: Home) -> None:
    light_home.start()

    assert [child.name for child in light_home.record().children] == ["redis"]
    assert "RAGSPEC_DATABASE_URL is set: using postgresql://***@" in light_home.output()
    assert light_home.url("database_url") == light_home.environment["RAGSPEC_DATABASE_URL"]


def test_a_second_up_names_the_first(light_home: Home) -> None:
    first = light_home.start()

    second = light_home.ragspec("up", *BARE)

    assert second.returncode == 73
    assert "error[already_running]" in second.stderr
    assert f"process {first.pid}" in second.stderr
    assert "ragspec down" in second.stderr
    assert first.poll() is None


def test_ctrl_c_stops_everything(light_home: Home) -> None:
    up = light_home.start()
    child = light_home.child("redis")

    up.send_signal(signal.SIGINT)

    assert up.wait(30) == 0
    assert child.find() is None


def test_a_killed_part_is_started_again_at_the_same_address(light_home: Home) -> None:
    light_home.start()
    url, killed = light_home.url("redis_url"), light_home.child("redis")

    os.kill(killed.pid, signal.SIGKILL)

    until(lambda: "redis: well again" in light_home.output())
    with redis.Redis.from_url(url) as client:
        assert client.ping()
    assert light_home.child("redis").pid != killed.pid
    assert f"process {killed.pid} was killed by SIGKILL; starting it again in 1 s" in light_home.output()


def test_a_part_that_keeps_dying_is_given_up_with_its_last_words(light_home: Home) -> None:
    """Not one more start is granted here, so that the test need not wait out the pauses."""
    program = """if True:
        from ragspec.services import supervisor
        supervisor.MOST_DEATHS = 0
        supervisor.run_up(print, with_worker=False, fronts=[])
    """
    up = light_home.start(sys.executable, "-u", "-c", program)

    os.kill(light_home.child("redis").pid, signal.SIGKILL)

    assert up.wait(30) == 1
    assert "everything is being stopped" in light_home.output()
    assert "Ready to accept connections" in light_home.output()
    assert light_home.ragspec("down").stdout.startswith("Nothing runs")


def test_a_killed_supervisor_leaves_no_orphan(home: Home) -> None:
    """All three stores end although nobody was left to end them, and the next `up` finds its way."""
    up = home.start()
    children = home.record().children
    grandchildren = [ProcessId.of("", p.pid) for c in children for p in psutil.Process(c.pid).children(recursive=True)]

    up.kill()
    up.wait()

    until(lambda: not any(process.find() for process in (*children, *grandchildren) if process))
    asked = home.ragspec("status")
    assert asked.returncode == 69
    assert f"PostgreSQL is gone: the `ragspec up` of {home.path} is not running any more." in asked.stderr
    home.start()
    assert home.ragspec("status").returncode == 0


def test_leftovers_are_ended_and_strangers_are_not(light_home: Home) -> None:
    """A recorded number that another process has by now is not that process."""
    leftover, stranger = (subprocess.Popen(("sleep", "600"), start_new_session=True) for _ in range(2))
    try:
        known, other = ProcessId.of("redis", leftover.pid), ProcessId.of("chroma", stranger.pid)
        assert known
        assert other
        aged = ProcessId("chroma", stranger.pid, other.born - 100)
        (light_home.path / "run").mkdir()
        Record(ProcessId("ragspec up", stranger.pid, 0), "ready", (known, aged)).write(light_home.path)

        light_home.start()

        assert f"redis: ended process {leftover.pid}, left behind" in light_home.output()
        assert leftover.wait(10) != 0
        assert stranger.poll() is None
    finally:
        for process in (leftover, stranger):
            process.kill()
            process.wait()


def test_a_configured_store_that_does_not_answer_is_named(light_home: Home) -> None:
    light_home.environment["RAGSPEC_DATABASE_URL"] = "postgresql://me:hunter2@127.0.0.1:1/none"

    up = light_home.ragspec("up", "--detach", *BARE)

    assert up.returncode == 69
    assert "RAGSPEC_DATABASE_URL=postgresql://***@127.0.0.1:1/none does not answer" in up.stdout
    assert "hunter2" not in up.stdout + up.stderr
    assert read_record(light_home.path) is None


def test_a_taken_flower_port_that_was_asked_for_is_named(light_home: Home, redis_url: str) -> None:
    taken = redis_url.rpartition(":")[2].partition("/")[0]
    assert is_taken(int(taken))
    light_home.environment["RAGSPEC_FLOWER_PORT"] = taken

    up = light_home.ragspec("up", "--no-worker")

    assert up.returncode == 69
    assert f"error[port_taken]: RAGSPEC_FLOWER_PORT={taken} is taken" in up.stderr


def test_flower_asks_for_its_password_and_shows_what_a_shard_is(light_home: Home) -> None:
    light_home.environment |= {"RAGSPEC_FLOWER_PORT": "0", "RAGSPEC_FLOWER_PASSWORD": "hunter2"}
    light_home.start(sys.executable, "-m", "ragspec", "up", "--no-worker")
    page = light_home.url("flower_url") + "/tasks"

    stranger = httpx.get(page)
    guest = httpx.get(page, auth=("ragspec", "hunter2"))

    assert stranger.status_code == 401
    assert guest.status_code == 200
    assert {"kwargs", "result", "runtime"} < set(re.findall(r'data-column="(\w+)"', guest.text))
    assert "hunter2" not in light_home.output()


def test_a_home_that_cannot_be_written_is_named(home: Home) -> None:
    (home.path / "file").write_text("in the way")
    environment = home.environment | {"RAGSPEC_HOME": str(home.path / "file" / "home")}

    up = Home(home.path / "file" / "home", environment).ragspec("up")

    assert up.returncode == 69
    assert "error[home_unusable]" in up.stderr
    assert "Not a directory" in up.stderr
