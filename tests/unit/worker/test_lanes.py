"""Who is served next."""

from __future__ import annotations

from ragspec.jobs.answer import Question
from ragspec.jobs.options import AnswerOptions
from worker.resident.lanes import Lanes
from worker.resident.ticket import Ticket, issue, seed_of

BULK = AnswerOptions(collection="docs")
INTERACTIVE = AnswerOptions(collection="docs", queue="interactive")


def ticket(number: int, connection: int, options: AnswerOptions = BULK) -> Ticket:
    return issue(number, connection, Question(number, f"q{number}", "?"), options, 0.0)


def test_connections_are_served_in_turn() -> None:
    lanes = Lanes()
    for number, connection in enumerate([1, 1, 1, 2, 2, 3]):
        lanes.put(ticket(number, connection))

    assert [one.connection for one in lanes.take(0, 10)] == [1, 2, 3, 1, 2, 1]


def test_interactive_questions_go_first_and_have_a_limit_of_their_own() -> None:
    lanes = Lanes()
    lanes.put(ticket(0, 1))
    lanes.put(ticket(1, 2, INTERACTIVE))
    lanes.put(ticket(2, 2, INTERACTIVE))

    assert [one.id for one in lanes.take(1, 0)] == ["1"]
    assert [one.id for one in lanes.take(5, 5)] == ["2", "0"]
    assert (lanes.interactive, lanes.bulk) == (0, 0)


def test_what_was_taken_and_comes_back_goes_ahead_of_its_connections_others() -> None:
    lanes = Lanes()
    for number in range(4):
        lanes.put(ticket(number, 1))
    lanes.put(ticket(4, 2, INTERACTIVE))
    lanes.put_back(lanes.take(1, 2))

    assert [one.id for one in lanes.take(5, 5)] == ["4", "0", "1", "2", "3"]


def test_what_a_gone_connection_waits_for_is_forgotten() -> None:
    lanes = Lanes()
    lanes.put(ticket(0, 1))
    lanes.put(ticket(1, 2))
    lanes.drop(1)

    assert [one.id for one in lanes.take(5, 5)] == ["1"]


def test_a_row_keeps_its_own_seed_and_the_others_derive_theirs_from_the_job() -> None:
    own = issue(0, 1, Question(0, "a", "?", {"seed": 7}), BULK, 0.0)
    derived = [issue(0, 1, Question(0, name, "?"), BULK, 0.0).seed for name in ("a", "b", "a")]

    assert own.seed == 7
    assert derived[0] == derived[2] != derived[1]
    # Stored with answers: a change of the formula would make old jobs irreproducible.
    assert seed_of(0, "q1") == 1301494736
