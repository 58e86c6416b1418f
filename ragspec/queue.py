"""The queue: one Celery configuration for those who send shards and those who answer them. No torch, no SQLAlchemy.

Redis only wakes workers up; which shards there are and who has them is PostgreSQL's business. So a message may be
lost (the sweep sends it again) or come twice (the claim makes the second a no-op), and no result backend is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from celery import Celery
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from ragspec.asking.message import AskMessage
from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.message import ShardMessage
from ragspec.settings import Settings

#: Task names, spelled out so that a sender need not import the worker.
ANSWER_SHARD = "ragspec.answer_shard"
SWEEP = "ragspec.sweep"
ASK = "ragspec.ask"
#: `bulk` and `interactive` hold shards, `ask` single questions of gateways, and the sweep has a queue of its own.
ASKS = "ask"
CONTROL = "control"
QUEUES = ("bulk", "interactive", ASKS, CONTROL)
#: Seconds until a Redis that does not accept a connection counts as down.
CONNECT_TIMEOUT_S = 5
#: Seconds between two looks for messages whose worker died without a word.
RESTORE_INTERVAL_S = 5


def celery_app(settings: Settings) -> Celery:
    """The Celery app: of producers as it is, of workers with their tasks added.

    Raises:
        ServiceUnavailableError: no Redis is configured or running.
    """
    app = Celery("ragspec", broker=settings.require_redis(), set_as_current=False)
    # The anonymous exchange puts a message straight on the list of its queue's name. With a named one, Redis would
    # hold the bindings, and a flush would leave every long-lived sender without a route.
    anonymous = Exchange("", type="direct")
    app.conf.update(
        task_default_exchange="",
        task_queues=[Queue(name, exchange=anonymous, routing_key=name) for name in QUEUES],
        task_default_queue=CONTROL,
        task_create_missing_queues=False,
        task_routes={ANSWER_SHARD: {"queue": "bulk"}, ASK: {"queue": ASKS}, SWEEP: {"queue": CONTROL}},
        # Nothing is ever unpickled.
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        event_serializer="json",
        task_ignore_result=True,
        # A message is done when its shard was handled, not when it was received; a child that dies gives it back.
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        # A task that raises is not redelivered: its shard is in the database and the sweep takes it, with a count of
        # its tries, which a requeued message does not carry.
        task_acks_on_failure=True,
        task_acks_on_timeout=True,
        worker_prefetch_multiplier=1,
        # No soft shutdown: SIGTERM is Celery's warm one, which waits for its tasks however long they take. They end early
        # because they see the node's drain flag, and the worker's supervisor kills a node that is not gone after
        # `shutdown_timeout`.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        # Loaded with its imports, a child takes longer to report than Celery's 4 s on a busy machine.
        worker_proc_alive_timeout=60.0,
        worker_send_task_events=True,
        broker_connection_timeout=CONNECT_TIMEOUT_S,
        broker_connection_retry_on_startup=True,
        # A worker waits for Redis for as long as it takes.
        broker_connection_max_retries=None,
        # A sender that finds every connection taken gives up instead of blocking for ever.
        broker_pool_acquire_timeout=10.0,
        task_publish_retry_policy={"max_retries": 2, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5},
        broker_transport_options={
            "visibility_timeout": settings.visibility_timeout,
            "unacked_restore_interval": RESTORE_INTERVAL_S,
            "unacked_restore_throttle": 1,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_keepalive": True,
        },
        beat_schedule={
            "sweep": {
                "task": SWEEP,
                "schedule": settings.sweep_interval,
                # Sweeps that no worker was there to take do not pile up.
                "options": {"queue": CONTROL, "expires": settings.sweep_interval},
            }
        },
        timezone="UTC",
        enable_utc=True,
    )
    return app


def send_shards(app: Celery, messages: Iterable[ShardMessage]) -> int:
    """Send one message a shard over one connection; returns how many were sent.

    Raises:
        ServiceUnavailableError: Redis does not answer. What was sent before stays sent; the rest counts as lost,
            and the sweep sends it.
    """
    sent = 0
    with _reachable(app), app.producer_or_acquire() as producer:
        for message in messages:
            app.send_task(
                ANSWER_SHARD,
                kwargs={
                    "job_id": str(message.job_id),
                    "shard_no": message.shard_no,
                    "questions": message.questions,
                },
                queue=message.queue,
                producer=producer,
            )
            sent += 1
    return sent


def send_ask(app: Celery, message: AskMessage) -> None:
    """Send one question of a gateway. Once its deadline is past no worker starts on it.

    Raises:
        ServiceUnavailableError: Redis does not answer.
    """
    with _reachable(app):
        app.send_task(
            ASK,
            kwargs={"message": message.model_dump(mode="json")},
            kwargsrepr=repr({"id": message.id}),  # Flower shows it, and who watches Flower is not who asks
            queue=ASKS,
            expires=datetime.fromtimestamp(message.deadline, UTC),
        )


def waiting(app: Celery) -> dict[str, int]:
    """Messages that wait in each queue, those that a worker holds not counted.

    Raises:
        ServiceUnavailableError: Redis does not answer.
    """
    with _reachable(app), app.connection_for_read() as connection:
        channel = connection.default_channel
        return {name: channel.queue_declare(queue=name).message_count for name in QUEUES}


def check_broker(app: Celery) -> None:
    """Make sure that Redis answers.

    Raises:
        ServiceUnavailableError: it does not.
    """
    with _reachable(app), app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=CONNECT_TIMEOUT_S)


@contextmanager
def _reachable(app: Celery) -> Iterator[None]:
    try:
        yield
    except (OperationalError, RedisError, OSError) as error:
        reason = str(error.__cause__ or error).rstrip(".")
        broker = app.connection_for_write()
        raise ServiceUnavailableError(
            f"Redis at {broker.hostname}:{broker.port} does not answer: {reason}.",
            "Start it with `ragspec up`, or check RAGSPEC_REDIS_URL.",
        ) from error
