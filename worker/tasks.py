"""The tasks. Each returns a short summary, for Flower; the truth is in PostgreSQL."""

from __future__ import annotations

import logging
import os
import platform
import select
import time
from functools import cache
from uuid import UUID

from celery import Task
from sqlalchemy import Engine

from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.database import connect
from ragspec.jobs.message import ShardMessage
from ragspec.jobs.sweep import sweep as sweep_jobs
from ragspec.queue import ANSWER_SHARD, SWEEP, send_shards, waiting
from ragspec.settings import Settings, settings
from worker.app import app
from worker.drain import Drain, node_drain
from worker.ledger import Ledger
from worker.link import EngineLostError, Link
from worker.shard import WINDOW_BATCHES, ShardRun

log = logging.getLogger(__name__)

#: Seconds that a message waits for an engine that is restarting before it goes back to the queue, where another
#: worker may take it. The wait is also what keeps a message without an engine from going round and round.
ENGINE_PATIENCE_S = 5.0
ENGINE_RETRY_S = 0.25


@app.task(name=ANSWER_SHARD, bind=True)  # type: ignore[untyped-decorator]  # celery ships no types
def answer_shard(self: Task, job_id: str, shard_no: int, questions: int) -> str:
    """Answer what is unanswered of a shard."""
    message = ShardMessage(UUID(job_id), shard_no, self.request.delivery_info["routing_key"], questions)
    config, drain = settings(), node_drain()
    # The engine is reached before the shard is claimed: an engine that restarts costs the shard no try.
    link = _reach_engine(config, drain)
    if link is None:
        return _hand_back(message, "no engine")
    with link:
        ledger = Ledger(_database(), drain, patience=config.stale_after)
        try:
            return _answer(message, link, ledger, config, drain)
        except ServiceUnavailableError as error:
            log.error("shard %d of job %s: %s", shard_no, job_id, error)  # noqa: TRY400 - its cause is no bug of ours
            return _hand_back(message, "no database")


@app.task(name=SWEEP)  # type: ignore[untyped-decorator]  # celery ships no types
def sweep() -> str:
    """Repair what died or got lost, and send the messages that are missing."""
    config = settings()
    messages = sweep_jobs(
        _database(), stale_after=config.stale_after, max_attempts=config.max_attempts, waiting=waiting(app)
    )
    return f"{send_shards(app, messages)} sent"


def _answer(message: ShardMessage, link: Link, ledger: Ledger, config: Settings, drain: Drain) -> str:
    shard = ledger.claim(
        message.job_id,
        message.shard_no,
        f"{platform.node()}:{os.getpid()}",
        stale_after=config.stale_after,
        max_attempts=config.max_attempts,
    )
    if shard is None:
        return "skipped"
    run = ShardRun(
        shard,
        link,
        ledger,
        drain,
        window=WINDOW_BATCHES * config.max_batch,
        heartbeat_interval=config.heartbeat_interval,
    )
    try:
        ending = run.run()
    except ServiceUnavailableError:
        ledger.release(shard.claim, resent=True)
        raise
    except Exception:
        ledger.release(shard.claim, counts=True)  # the sweep sends it again, as often as tries are left
        raise
    tally = f"{run.tally.completed} answered, {run.tally.failed} failed"
    match ending:
        case "done":
            ledger.finish(shard.claim)
            return tally
        case "lost":
            return f"lost: {tally}"
        case "cancelled":
            ledger.release(shard.claim)
            return f"cancelled: {tally}"
        case "drained":
            ledger.release(shard.claim, resent=True)
            return _hand_back(message, tally)
        case "engine_lost":
            ledger.release(shard.claim, counts=run.outstanding > 0, resent=True)
            return _hand_back(message, f"engine lost, {tally}")


def _reach_engine(config: Settings, drain: Drain) -> Link | None:
    """A connection to the engine, or None where it stays away or the node drains."""
    if config.engine_socket is None:
        return None
    give_up_at = time.monotonic() + ENGINE_PATIENCE_S
    while not drain.begun():
        try:
            return Link(config.engine_socket, timeout=ENGINE_PATIENCE_S)
        except EngineLostError as error:
            if time.monotonic() >= give_up_at:
                log.warning("%s", error)
                return None
            select.select([drain], [], [], ENGINE_RETRY_S)
    return None


def _hand_back(message: ShardMessage, why: str) -> str:
    """Put the message back into its queue, behind the others; the one in hand is acknowledged by returning."""
    try:
        send_shards(app, [message])
    except ServiceUnavailableError as error:
        log.warning("shard %d of job %s is left to the sweep: %s", message.shard_no, message.job_id, error)
    return f"handed back: {why}"


@cache
def _database() -> Engine:
    """This pool child's connections; the node's parent has none that a fork could share."""
    return connect(settings().require_database())
