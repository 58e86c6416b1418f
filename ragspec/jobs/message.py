"""What goes over the queue for a shard. This file imports neither torch nor SQLAlchemy."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from ragspec.jobs.options import Queue


@dataclass(frozen=True, slots=True)
class ShardMessage:
    """One shard that waits for a worker.

    Attributes:
        job_id, shard_no: which; everything else a worker needs is in the database.
        queue: the queue its job asked for.
        questions: how many it holds, for those who watch the queue.
    """

    job_id: UUID
    shard_no: int
    queue: Queue
    questions: int
