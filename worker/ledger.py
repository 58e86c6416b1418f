"""A claim's dealings with PostgreSQL, patient with a server that is away for a moment."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from ragspec.errors import ServiceUnavailableError
from ragspec.jobs import answers, claims
from ragspec.jobs.answer import Answer, Question
from worker.drain import Drain

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: What is worth another try: the server restarts, fails over, or the network blinks.
TRANSIENT = (OperationalError, InterfaceError, ServiceUnavailableError)
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class Ledger:
    """PostgreSQL as one task sees it.

    Every method tries again, with growing pauses, for `patience` seconds; then, or when the node drains, it raises
    `ServiceUnavailableError`.
    """

    def __init__(self, engine: Engine, drain: Drain, patience: float) -> None:
        """Bind the ledger to a database.

        Args:
            engine: the database.
            drain: ends the patience.
            patience: seconds; beyond the life of a claim without heartbeat there is nothing left to wait for.
        """
        self._engine = engine
        self._drain = drain
        self._patience = patience

    def claim(
        self, job_id: UUID, shard_no: int, worker: str, *, stale_after: float, max_attempts: int
    ) -> claims.ClaimedShard | None:
        """See `ragspec.jobs.claims.claim_shard`."""
        return self._try(
            lambda: claims.claim_shard(
                self._engine, job_id, shard_no, worker, stale_after=stale_after, max_attempts=max_attempts
            )
        )

    def unanswered(self, claim: claims.Claim, batch: int) -> Iterator[list[Question]]:
        """The questions of the claim that have no answer, in batches; read as they are taken."""
        after_idx = -1
        while questions := self._try(partial(claims.unanswered, self._engine, claim, after_idx=after_idx, batch=batch)):
            yield questions
            after_idx = questions[-1].idx

    def record(self, claim: claims.Claim, ready: Sequence[Answer]) -> int:
        """Write answers; the number of rows written, 0 where the claim is lost.

        An answer that PostgreSQL refuses (a count beyond its column, say) is written as a failed row, the others as
        they are.
        """
        try:
            return self._try(lambda: answers.record_answers(self._engine, claim, ready))
        except DBAPIError as error:
            if len(ready) > 1:
                return sum(self.record(claim, [answer]) for answer in ready)
            log.exception("answer %d of job %s cannot be stored", ready[0].idx, claim.job_id)
            substitute = replace(
                Answer(ready[0].idx, "failed", error_code="internal_error"),
                error_message=f"The answer cannot be stored: {type(error.orig).__name__}.",
            )
            return self._try(lambda: answers.record_answers(self._engine, claim, [substitute]))

    def beat(self, claim: claims.Claim) -> Literal["ok", "lost", "cancelled"]:
        """See `ragspec.jobs.claims.beat`."""
        return self._try(lambda: claims.beat(self._engine, claim))

    def release(self, claim: claims.Claim, *, counts: bool = False, resent: bool = False) -> None:
        """See `ragspec.jobs.claims.release`; tried once, for the sweep takes what a node could not hand back."""
        try:
            claims.release(self._engine, claim, counts=counts, resent=resent)
        except TRANSIENT as error:
            log.warning("shard %d of job %s is not released: %s", claim.shard_no, claim.job_id, error)

    def finish(self, claim: claims.Claim) -> bool:
        """See `ragspec.jobs.claims.finish_shard`."""
        return self._try(lambda: claims.finish_shard(self._engine, claim))

    def _try(self, act: Callable[[], Result]) -> Result:
        give_up_at, pause_s = time.monotonic() + self._patience, FIRST_PAUSE_S
        while True:
            try:
                return act()
            except TRANSIENT as error:
                if time.monotonic() + pause_s > give_up_at or select.select([self._drain], [], [], pause_s)[0]:
                    raise ServiceUnavailableError(f"PostgreSQL does not answer: {error}") from error
                log.warning("PostgreSQL does not answer (%s); trying again", type(error).__name__)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
