"""A machine's worth of real processes around one job queue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import redis
from celery import Celery
from sqlalchemy import Engine, func, select

from ragspec.jobs.message import ShardMessage
from ragspec.jobs.tables import AnswerRow, Job, Shard
from ragspec.queue import celery_app, send_shards, waiting
from ragspec.services.home import worker_report
from ragspec.settings import Settings, child_environment
from tests.integration.jobs.worlds import make_job
from worker.link import Link
from worker.protocol import Ping, Pong

ROOT = Path(__file__).parents[3]


class Yard:
    """Starts workers and beat, watches a job, and leaves nothing running."""

    def __init__(self, home: Path, database: Engine, database_url: str, redis_url: str) -> None:
        self.home = home
        self.database = database
        self.redis = redis.Redis.from_url(redis_url)
        self.redis.flushdb()
        self.services = {"database_url": database_url, "redis_url": redis_url, "chroma_url": "http://127.0.0.1:1"}
        self.app: Celery = celery_app(Settings(**self.services))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._last: Worker | None = None
        self.behave()

    def behave(self, step_s: float = 0.02, **knobs: Any) -> None:
        """Say how the engines behave from now on."""
        draft = self.home / "stand-in.draft"
        draft.write_text(json.dumps({"step_s": step_s, **knobs}))
        draft.replace(self.home / "stand-in.json")

    def start_worker(self) -> Worker:
        """A worker, ready."""
        worker = Worker(self._start("tests.integration.worker.stand_in_worker"), self.home)
        self.until(worker.serving, 60)
        return worker

    def a_worker(self) -> Worker:
        """One that is ready: the last one, or where that has ended a new one."""
        if self._last is None or self._last.process.poll() is not None:
            self._last = self.start_worker()
        return self._last

    def start_beat(self) -> None:
        """The clock of the sweep."""
        self._start("celery", "-A", "worker.app", "--quiet", "beat", f"--schedule={self.home / 'beat'}")

    def submit(self, questions: int, shard_size: int) -> UUID:
        """Record a job and send its messages."""
        job_id = make_job(self.database, questions, shard_size)
        with self.database.connect() as connection:
            query = select(Shard.shard_no, Shard.end_idx - Shard.start_idx).where(Shard.job_id == job_id)
            shards = connection.execute(query).all()
        send_shards(self.app, [ShardMessage(job_id, number, "bulk", size) for number, size in shards])
        return job_id

    def state(self, job_id: UUID) -> str:
        with self.database.connect() as connection:
            return connection.execute(select(Job.state).where(Job.id == job_id)).scalar_one()

    def answered(self, job_id: UUID) -> int:
        with self.database.connect() as connection:
            return connection.execute(
                select(func.count()).select_from(AnswerRow).where(AnswerRow.job_id == job_id)
            ).scalar_one()

    def shards(self, job_id: UUID) -> list[Any]:
        with self.database.connect() as connection:
            query = select(*Shard.__table__.columns).where(Shard.job_id == job_id).order_by(Shard.shard_no)
            return list(connection.execute(query))

    def texts(self, job_id: UUID) -> dict[int, str]:
        with self.database.connect() as connection:
            rows = connection.execute(select(AnswerRow.idx, AnswerRow.text).where(AnswerRow.job_id == job_id)).all()
        assert max(Counter(idx for idx, _ in rows).values()) == 1
        return {idx: text for idx, text in rows}  # noqa: C416 - a Row is no pair

    def answered_at(self, job_id: UUID) -> dict[int, datetime]:
        """When each answer was written."""
        with self.database.connect() as connection:
            query = select(AnswerRow.idx, AnswerRow.created_at).where(AnswerRow.job_id == job_id)
            return {idx: written for idx, written in connection.execute(query)}  # noqa: C416 - a Row is no pair

    def waiting(self) -> int:
        """Bulk messages that wait in Redis."""
        return waiting(self.app)["bulk"]

    def unacknowledged(self) -> int:
        """Messages that some node has taken and not acknowledged, as far as Redis knows."""
        return int(self.redis.zcard("unacked_index"))

    def until(self, true: Callable[[], bool], timeout: float = 60.0) -> None:
        """Return once `true()` holds; fail with the processes' logs beside it after `timeout` seconds."""
        give_up_at = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < give_up_at, f"it never came true; logs in {self.home}"
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._processes:
            for child in [*_tree(process.pid), process]:
                child.kill()
            process.wait()
        self.app.close()
        self.redis.flushdb()
        self.redis.close()

    def _start(self, *module: str) -> subprocess.Popen[bytes]:
        environment = child_environment(
            **self.services,
            home=self.home,
            heartbeat_interval=0.3,
            stale_after=1.5,
            sweep_interval=0.5,
            engine_timeout=2,
            shutdown_timeout=5,
            max_batch=4,
            bulk_concurrency=2,
            interactive_concurrency=1,
            ask_concurrency=32,
            max_attempts=5,
        )
        log = (self.home / f"{module[0]}-{len(self._processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


class Worker:
    """A running supervisor and what it supervises."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path) -> None:
        self.process = process
        self.report_path = worker_report(home, process.pid)

    def report(self) -> dict[str, Any]:
        return json.loads(self.report_path.read_text()) if self.report_path.exists() else {}

    def resident(self) -> psutil.Process:
        return next(
            child for child in self._children() if "tests.integration.worker.stand_in_resident" in _words(child)
        )

    def node(self, queue: str = "bulk") -> psutil.Process:
        return next(child for child in self._children() if f"--queue={queue}" in _words(child))

    def serving(self) -> bool:
        """Whether the bulk node has its pool."""
        assert self.process.poll() is None, "the worker ended"
        try:
            return self.report().get("state") == "ready" and len(self.node().children()) >= 2
        except StopIteration:
            return False

    def tree(self) -> list[psutil.Process]:
        return _tree(self.process.pid)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 30) -> int:
        os.kill(self.process.pid, number)
        return self.process.wait(timeout)

    def _children(self) -> Iterator[psutil.Process]:
        yield from psutil.Process(self.process.pid).children()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def engine_is_idle(worker: Worker) -> bool:
    """Whether its resident process has nothing to answer."""
    with Link(Path(worker.report()["socket"]), 5.0) as link:
        link.send(Ping())
        (pong,) = link.read(5.0)
    assert isinstance(pong, Pong)
    return pong.waiting + pong.running == 0


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
