"""The queue on a real Redis: what is sent is received, also after a flush, by those who were connected before it."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
import redis
from celery import Celery

from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.message import ShardMessage
from ragspec.queue import ANSWER_SHARD, ASKS, CONTROL, SWEEP, celery_app, check_broker, send_shards, waiting
from ragspec.settings import Settings

pytestmark = pytest.mark.services


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    """The server, emptied."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        yield client
        client.flushdb()


@pytest.fixture
def app(redis_url: str, server: redis.Redis) -> Iterator[Celery]:
    app = celery_app(Settings(redis_url=redis_url))
    yield app
    app.close()


def messages(n: int, queue: str = "bulk") -> list[ShardMessage]:
    job_id = uuid4()
    return [ShardMessage(job_id, shard_no, queue, 64) for shard_no in range(n)]  # type: ignore[arg-type]


def test_shards_wait_in_the_queue_their_job_asked_for(app: Celery) -> None:
    assert send_shards(app, [*messages(3), *messages(2, "interactive")]) == 5

    assert waiting(app) == {"bulk": 3, "interactive": 2, ASKS: 0, CONTROL: 0}


def test_a_sender_and_a_receiver_outlive_a_flush(app: Celery, server: redis.Redis) -> None:
    received = []
    with (
        app.connection_for_read() as connection,
        app.producer_or_acquire() as producer,
        app.amqp.TaskConsumer(connection, queues=[app.amqp.queues["bulk"]]) as consumer,
    ):
        consumer.callbacks = [lambda body, message: (received.append(body[1]), message.ack())]
        for shard_no in range(3):
            message = messages(shard_no + 1)[shard_no]
            kwargs = {"job_id": str(message.job_id), "shard_no": shard_no, "questions": 64}
            app.send_task(ANSWER_SHARD, kwargs=kwargs, queue="bulk", producer=producer)
            while len(received) <= shard_no:
                connection.drain_events(timeout=10)
            server.flushdb()

    assert [kwargs["shard_no"] for kwargs in received] == [0, 1, 2]


def test_nothing_but_the_queue_itself_is_kept_in_redis(app: Celery, server: redis.Redis) -> None:
    """No binding that a flush could take away, no result that nobody reads."""
    send_shards(app, messages(1))

    assert server.keys() == [b"bulk"]


def test_beat_sends_the_sweep_to_its_own_queue_and_lets_it_expire(redis_url: str) -> None:
    entry = celery_app(Settings(redis_url=redis_url, sweep_interval=7)).conf.beat_schedule["sweep"]

    assert entry == {"task": SWEEP, "schedule": 7, "options": {"queue": CONTROL, "expires": 7}}


def test_a_broker_that_is_down_is_named_without_its_password() -> None:
    app = celery_app(Settings(redis_url="redis://:hunter2@127.0.0.1:1/0"))

    for ask in (lambda: check_broker(app), lambda: send_shards(app, messages(1))):
        with pytest.raises(ServiceUnavailableError, match=r"Redis at 127\.0\.0\.1:1 does not answer") as caught:
            ask()
        assert "hunter2" not in str(caught.value)
