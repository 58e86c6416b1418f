"""Questions that wait for a store which does not answer, by collection.

While a collection is silent one question, the oldest, asks for all that wait for it, ever more rarely. So the retrieval
thread never sleeps on a store, and a store that comes back is not met by hundreds of questions at once. It may be the question
and not the store: the first whose patience ends gives up alone, and the next asks at once. Where that is not answered either,
all whose patience has ended give up together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.resident.ticket import Ticket

#: Seconds for which a question waits for a store that does not answer before it fails: a restart of Chroma fits in.
PATIENCE_S = 60.0
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: Ticket
    give_up_at: float


@dataclass(slots=True)
class _Silent:
    """A silent collection: when it is asked again, the pause after that, and by ticket who waits, oldest first.

    `gave_up`: one that asked has given up; whoever asks next tells whether that was the question or the store.
    """

    ask_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    gave_up: bool = False
    waiting: dict[str, _Waiting] = field(default_factory=dict)


class Silence:
    """Who waits for which silent collection; not thread-safe. `now` is the monotonic clock, seconds.

    Args:
        patience_s: seconds for which a question waits at most.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._silent: dict[str | None, _Silent] = {}  # none of them without a question that waits

    @property
    def bulk(self) -> int:
        """Bulk questions that wait."""
        return sum(not one.ticket.interactive for silent in self._silent.values() for one in silent.waiting.values())

    def holds_up(self, ticket: Ticket, now: float) -> bool:
        """Whether the question's collection is silent; then it is set aside."""
        silent = self._silent.get(ticket.collection)
        if silent:
            self._set_aside(ticket, silent, now)
        return silent is not None

    def begin(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Set aside a question whose store did not answer; whoever asked before it stays where it was.

        Returns: those that give up, as their patience ends before the collection is asked again; they wait no more.
        """
        silent = self._silent.setdefault(ticket.collection, _Silent())
        if now >= silent.ask_at:  # the first of those that asked together
            silent.ask_at = now + silent.pause_s
            silent.pause_s = min(2 * silent.pause_s, LONGEST_PAUSE_S)
        self._set_aside(ticket, silent, now)
        late = [one.ticket for one in silent.waiting.values() if one.give_up_at < silent.ask_at]
        if late and not silent.gave_up:
            late = late[:1]
            silent.gave_up, silent.ask_at = True, now
        for given_up in late:
            self._remove(given_up)
        return late

    def end(self, ticket: Ticket) -> list[Ticket]:
        """The question's collection answers: all others that waited for it, oldest first."""
        silent = self._silent.pop(ticket.collection, _Silent())
        return [one.ticket for one in silent.waiting.values() if one.ticket.id != ticket.id]

    def due(self, now: float) -> list[Ticket]:
        """The oldest question of each collection that is to be asked again; it stays set aside meanwhile."""
        return [next(iter(silent.waiting.values())).ticket for silent in self._silent.values() if now >= silent.ask_at]

    def pause(self, now: float) -> float | None:
        """Seconds until the next is due; None where nobody waits."""
        return min((silent.ask_at - now for silent in self._silent.values()), default=None)

    def drop(self, connection: int) -> None:
        """Forget what a connection waits for."""
        for silent in list(self._silent.values()):
            for one in list(silent.waiting.values()):
                if one.ticket.connection == connection:
                    self._remove(one.ticket)

    def _set_aside(self, ticket: Ticket, silent: _Silent, now: float) -> None:
        silent.waiting.setdefault(ticket.id, _Waiting(ticket, now + self._patience_s))

    def _remove(self, ticket: Ticket) -> None:
        silent = self._silent[ticket.collection]
        del silent.waiting[ticket.id]
        if not silent.waiting:
            del self._silent[ticket.collection]
