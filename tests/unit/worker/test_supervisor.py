"""What the supervisor does without a working engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worker.child import Child
from worker.report import Report, remove, report_path, write

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


def test_a_child_that_ends_is_started_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("worker.child.time.monotonic", lambda: clock[0])
    child = Child("one", [sys.executable, "-c", "raise SystemExit(3)"], {})
    child.start()
    child._process.wait()

    assert child.ended() == 3
    assert child.ended() is None
    assert not child.start_if_due()
    clock[0] += 0.6
    assert child.start_if_due()
    child._process.wait()
    assert child.ended() == 3
    clock[0] += 0.6
    assert not child.start_if_due()  # the second pause is longer
    clock[0] += 0.6
    assert child.start_if_due()
    child._process.wait()


def test_a_report_comes_and_goes(tmp_path: Path) -> None:
    write(tmp_path, Report(7, "ready", "/run/engine.sock", "model@1", 12, 1.5))

    assert '"state": "ready"' in report_path(tmp_path, 7).read_text()
    remove(tmp_path, 7)
    remove(tmp_path, 7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_process_whose_parent_is_gone_already_does_not_start() -> None:
    code = "from worker.lifeline import die_with; die_with(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)

    assert (done.returncode, done.stdout) == (-9, b"")
