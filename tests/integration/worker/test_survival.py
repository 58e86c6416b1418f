"""Whatever dies in mid-job, every question is answered exactly once."""

from __future__ import annotations

import signal
from uuid import UUID

import psutil
import pytest

from ragspec.jobs.cancel import cancel_job
from ragspec.jobs.sweep import sweep
from tests.integration.jobs.worlds import age_messages
from tests.integration.worker.yard import Yard

pytestmark = pytest.mark.services

QUESTIONS, SHARD_SIZE = 120, 30
EXPECTED = {idx: f"question {idx}?"[::-1] for idx in range(QUESTIONS)}


def begun(yard: Yard) -> UUID:
    """A job of which something, but not all, is answered."""
    job_id = yard.submit(QUESTIONS, SHARD_SIZE)
    yard.until(lambda: yard.answered(job_id) > 0)
    assert yard.state(job_id) == "in_progress"
    return job_id


def completed(yard: Yard, job_id: UUID) -> bool:
    yard.until(lambda: yard.state(job_id) == "completed")
    return yard.texts(job_id) == EXPECTED


def test_a_job_is_answered_and_each_shard_claimed_once(yard: Yard) -> None:
    yard.start_worker()

    job_id = begun(yard)

    assert completed(yard, job_id)
    assert {(shard.attempt, shard.completed) for shard in yard.shards(job_id)} == {(1, SHARD_SIZE)}


def test_a_node_killed_in_mid_shard_costs_no_answer(yard: Yard) -> None:
    worker = yard.start_worker()
    yard.start_beat()
    job_id = begun(yard)
    worker.node().kill()

    assert completed(yard, job_id)
    assert max(shard.attempt for shard in yard.shards(job_id)) > 1


def test_a_node_told_to_stop_in_mid_shard_hands_back_the_rest_to_the_next(yard: Yard) -> None:
    worker = yard.start_worker()
    job_id = begun(yard)
    node = worker.node()
    node.terminate()

    yard.until(lambda: not node.is_running())
    kept = yard.answered_at(job_id)
    assert 0 < len(kept) < QUESTIONS
    assert completed(yard, job_id)  # without a sweep: the messages were handed back
    assert kept.items() <= yard.answered_at(job_id).items()
    shards = yard.shards(job_id)
    assert max(shard.attempt for shard in shards) > 1
    assert {shard.tries for shard in shards} == {1}  # being handed back cost none
    assert worker.node().pid != node.pid


def test_a_resident_killed_in_mid_shard_costs_no_answer(yard: Yard) -> None:
    worker = yard.start_worker()
    job_id = begun(yard)
    worker.resident().kill()

    assert completed(yard, job_id)  # without a sweep: the messages were handed back
    # An engine that is away costs no shard more than the try that it died under.
    assert max(shard.tries for shard in yard.shards(job_id)) == 2


def test_a_question_that_kills_every_engine_takes_none_before_it_along(yard: Yard) -> None:
    yard.behave(die_at="question 10?")
    yard.start_worker()
    job_id = yard.submit(SHARD_SIZE, SHARD_SIZE)

    yard.until(lambda: yard.answered(job_id) == 10)  # 8 and 9 shared a batch with it at first
    assert yard.texts(job_id).keys() == set(range(10))


def test_a_hung_engine_is_killed_and_its_work_done_by_the_next(yard: Yard) -> None:
    yard.behave(hang_at="question 50?")
    worker = yard.start_worker()
    yard.start_beat()
    hung = worker.resident()

    assert completed(yard, begun(yard))
    assert not hung.is_running()


def test_redis_flushed_in_mid_job_costs_no_answer(yard: Yard) -> None:
    yard.start_worker()
    yard.start_beat()
    job_id = begun(yard)
    yard.redis.flushdb()
    age_messages(yard.database, job_id)  # so that the sweep need not wait before it holds them for lost

    assert completed(yard, job_id)


def test_two_workers_share_a_job(yard: Yard) -> None:
    workers = [yard.start_worker(), yard.start_worker()]
    job_id = begun(yard)

    assert completed(yard, job_id)
    assert {shard.attempt for shard in yard.shards(job_id)} == {1}
    holders = {int(shard.worker.rpartition(":")[2]) for shard in yard.shards(job_id)}
    assert all(holders & {process.pid for process in worker.tree()} for worker in workers)


def test_a_stopped_worker_keeps_what_is_answered_and_hands_back_the_rest(yard: Yard) -> None:
    worker = yard.start_worker()
    job_id = begun(yard)
    processes = worker.tree()

    assert worker.stop() == 0
    assert not [process for process in processes if process.is_running()]
    assert not worker.report_path.exists()
    shards, answered = yard.shards(job_id), yard.answered(job_id)
    assert 0 < answered < QUESTIONS
    assert {shard.state for shard in shards} <= {"queued", "done"}
    assert max(shard.tries for shard in shards) <= 1  # `done` keeps its one; a shard handed back has none
    assert yard.waiting() == sum(shard.state == "queued" for shard in shards)
    assert yard.unacknowledged() == 0
    assert sweep(yard.database, stale_after=20, max_attempts=5, waiting={}) == []  # it knows of the messages

    yard.start_worker()  # and no sweep: the messages are all there
    assert completed(yard, job_id)


def test_a_killed_supervisor_leaves_no_process(yard: Yard) -> None:
    worker = yard.start_worker()
    processes = worker.tree()
    worker.stop(signal.SIGKILL)

    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert (len(processes), []) == (len(gone), alive)


def test_a_cancelled_job_stops(yard: Yard) -> None:
    yard.behave(step_s=0.1)
    yard.start_worker()
    job_id = begun(yard)
    cancel_job(yard.database, job_id)

    yard.until(lambda: yard.state(job_id) == "cancelled")
    assert 0 < yard.answered(job_id) < QUESTIONS


def test_no_node_has_torch_in_its_memory(yard: Yard) -> None:
    worker = yard.start_worker()
    assert completed(yard, begun(yard))

    resident = worker.resident().pid
    for process in worker.tree():
        if process.pid != resident:
            assert "torch" not in " ".join(mapping.path for mapping in process.memory_maps()), process.cmdline()
