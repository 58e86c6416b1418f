"""Questions that wait for retrieval: interactive before bulk, and within each the connections in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from worker.resident.ticket import Ticket


class Lanes:
    """Two lanes of one queue a connection; a connection that asks much delays nobody else's next question."""

    def __init__(self) -> None:
        self._interactive: dict[int, deque[Ticket]] = {}
        self._bulk: dict[int, deque[Ticket]] = {}

    @property
    def interactive(self) -> int:
        """Interactive questions that wait."""
        return sum(map(len, self._interactive.values()))

    @property
    def bulk(self) -> int:
        """Bulk questions that wait."""
        return sum(map(len, self._bulk.values()))

    def put(self, ticket: Ticket) -> None:
        """Queue a question."""
        self._lane(ticket).append(ticket)

    def put_back(self, tickets: Sequence[Ticket]) -> None:
        """Queue questions again that were taken before, ahead of their connections' others."""
        for ticket in reversed(tickets):
            self._lane(ticket).appendleft(ticket)

    def take(self, interactive: int, bulk: int) -> list[Ticket]:
        """Up to so many of each, interactive ones first."""
        return _take(self._interactive, interactive) + _take(self._bulk, bulk)

    def drop(self, connection: int) -> None:
        """Forget what a connection still waits for."""
        self._interactive.pop(connection, None)
        self._bulk.pop(connection, None)

    def _lane(self, ticket: Ticket) -> deque[Ticket]:
        lane = self._interactive if ticket.interactive else self._bulk
        return lane.setdefault(ticket.connection, deque())


def _take(lane: dict[int, deque[Ticket]], limit: int) -> list[Ticket]:
    taken: list[Ticket] = []
    while lane and len(taken) < limit:
        connection = next(iter(lane))
        queue = lane.pop(connection)
        taken.append(queue.popleft())
        if queue:
            lane[connection] = queue  # at the end: a dict keeps the order of insertion
    return taken
