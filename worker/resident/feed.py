"""Prepared questions on their way into the engine, those with a common prefix one after another.

The engine computes a prefix once for all who have it while it is in the cache, so prompts that begin with the same passage
should come together. Whose turn it is stays a matter of arrival: the connections lead in turn, each by its oldest question,
and whoever begins like it follows, from any connection, up to a limit.
"""

from __future__ import annotations

from collections import deque

from worker.resident.parts import BuiltPrompt
from worker.resident.preparation import Prepared


class Feed:
    """Questions with prompts; not thread-safe.

    Args:
        group_limit: questions that follow one another at most before the next connection leads.
    """

    def __init__(self, group_limit: int) -> None:
        self._group_limit = group_limit
        self._interactive: deque[Prepared] = deque()
        #: Per connection, what waits by ticket, oldest first; the connection that leads next is the first.
        self._lines: dict[int, dict[str, Prepared]] = {}
        self._groups: dict[tuple[int, ...], dict[str, Prepared]] = {}
        self._group: deque[Prepared] = deque()

    def __len__(self) -> int:
        return len(self._interactive) + self.bulk

    @property
    def bulk(self) -> int:
        """Bulk questions that wait."""
        return len(self._group) + sum(map(len, self._lines.values()))

    def put(self, prepared: Prepared) -> None:
        """Queue a question."""
        ticket = prepared.ticket
        if ticket.interactive:
            self._interactive.append(prepared)
            return
        self._lines.setdefault(ticket.connection, {})[ticket.id] = prepared
        if beginning := _beginning(prepared.prompt):
            self._groups.setdefault(beginning, {})[ticket.id] = prepared

    def take(self, bulk: int) -> list[Prepared]:
        """All interactive questions as they came, then up to so many bulk ones."""
        taken = list(self._interactive)
        self._interactive.clear()
        for _ in range(bulk):
            if not self._group and not self._gather():
                break
            taken.append(self._group.popleft())
        return taken

    def drop(self, connection: int) -> None:
        """Forget what a connection waits for."""
        self._interactive = _without(self._interactive, connection)
        self._group = _without(self._group, connection)
        for prepared in list(self._lines.get(connection, {}).values()):
            self._remove(prepared)

    def _gather(self) -> bool:
        """Line up the next group; False where nobody waits."""
        if not self._lines:
            return False
        connection = next(iter(self._lines))
        line = self._lines.pop(connection)
        self._lines[connection] = line  # at the end: the others lead before it does again
        leader = next(iter(line.values()))
        followers = self._groups.get(_beginning(leader.prompt), {}).values()
        group = [leader, *(one for one in followers if one is not leader)][: self._group_limit]
        for prepared in group:
            self._remove(prepared)
        # In the order of a trie's leaves, so that those that share more than the beginning are neighbours too.
        self._group.extend(sorted(group, key=lambda prepared: prepared.prompt.token_ids))
        return True

    def _remove(self, prepared: Prepared) -> None:
        ticket = prepared.ticket
        line = self._lines[ticket.connection]
        del line[ticket.id]
        if not line:
            del self._lines[ticket.connection]
        beginning = _beginning(prepared.prompt)
        if beginning:
            group = self._groups[beginning]
            del group[ticket.id]
            if not group:
                del self._groups[beginning]


def _beginning(prompt: BuiltPrompt) -> tuple[int, ...]:
    """The prompt up to the end of its first passage; empty where it has none."""
    return prompt.token_ids[: min((end for _, end in prompt.passage_spans), default=0)]


def _without(queue: deque[Prepared], connection: int) -> deque[Prepared]:
    return deque(prepared for prepared in queue if prepared.ticket.connection != connection)
