"""Who waits for a silent store, who asks it again and when, and who gives up."""

from __future__ import annotations

import pytest

from ragspec.jobs.answer import Question
from ragspec.jobs.options import AnswerOptions
from worker.resident.silence import Silence
from worker.resident.ticket import Ticket, issue

PATIENCE_S = 60.0


def ticket(number: int, connection: int = 1, **options: object) -> Ticket:
    job = AnswerOptions(**{"collection": "docs", **options})
    return issue(number, connection, Question(number, f"q{number}", "?"), job, 0.0)


def silent_since(now: float, *tickets: Ticket) -> Silence:
    silence = Silence(PATIENCE_S)
    for one in tickets:
        assert silence.begin(one, now) == []
    return silence


def ids(tickets: list[Ticket]) -> list[int]:
    return [int(one.id) for one in tickets]


def test_one_question_asks_for_all_that_wait_for_a_collection() -> None:
    silence = silent_since(100.0, ticket(0), ticket(1, top_k=1), ticket(2))

    assert silence.due(100.2) == []
    assert ids(silence.due(100.25)) == [0]


def test_a_collection_is_asked_ever_more_rarely() -> None:
    first = ticket(0)
    silence, now, pauses = silent_since(0.0, first, ticket(1)), 0.0, []
    for _ in range(7):
        pause = silence.pause(now)
        assert pause is not None
        pauses.append(pause)
        now += pause
        assert silence.begin(first, now) == []

    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert ids(silence.due(now + 5.0)) == [0]  # who has asked keeps its place


def test_questions_of_a_silent_collection_join_those_that_wait_and_others_do_not() -> None:
    silence = silent_since(0.0, ticket(0))

    assert silence.holds_up(ticket(1, queue="interactive"), 0.1)
    assert not silence.holds_up(ticket(2, collection="laws"), 0.1)
    assert not silence.holds_up(ticket(3, top_k=0), 0.1)
    assert silence.bulk == 1
    assert ids(silence.end(ticket(9))) == [0, 1]


def test_each_silent_collection_is_asked_by_a_question_of_its_own() -> None:
    silence = silent_since(0.0, ticket(0), ticket(1))
    silence.begin(ticket(2, collection="laws"), 0.1)

    assert ids(silence.due(0.3)) == [0]
    assert ids(silence.due(0.4)) == [0, 2]


def test_when_a_collection_answers_all_others_that_waited_come_back() -> None:
    asked = ticket(0)
    silence = silent_since(0.0, asked, ticket(1), ticket(2), ticket(3, collection="laws"))

    assert ids(silence.end(asked)) == [1, 2]
    assert silence.end(asked) == []
    assert ids(silence.due(1.0)) == [3]


def test_a_question_gives_up_when_its_own_patience_ends_before_it_is_asked_for_again() -> None:
    first, second = ticket(0), ticket(1)
    silence = silent_since(0.0, first)
    assert silence.holds_up(second, 40.0)
    for now in (0.25, 0.75, 1.75, 3.75, 7.75, *range(13, 54, 5)):
        assert silence.begin(first, float(now)) == []

    assert ids(silence.begin(first, 58.0)) == [0]
    assert ids(silence.due(58.0)) == [1]  # at once: perhaps it was the question
    assert silence.begin(second, 58.0) == []
    assert ids(silence.begin(second, 99.0)) == [1]
    assert silence.pause(99.0) is None


def test_a_question_that_no_store_answers_takes_none_behind_it_along() -> None:
    first, *others = (ticket(number) for number in range(20))
    silence = silent_since(0.0, first, *others)

    assert ids(silence.begin(first, 59.9)) == [0]
    assert ids(silence.due(59.9)) == [1]
    assert ids(silence.end(others[0])) == list(range(2, 20))
    assert (silence.pause(59.9), silence.bulk) == (None, 0)


def test_a_store_that_is_away_is_asked_by_no_more_than_one_other_before_all_give_up() -> None:
    tickets = [ticket(number) for number in range(20)]
    silence = silent_since(0.0, *tickets)
    assert silence.holds_up(ticket(20), 50.0)

    assert ids(silence.begin(tickets[0], 59.9)) == [0]
    assert ids(silence.begin(tickets[1], 60.0)) == list(range(1, 20))
    assert ids(silence.due(66.0)) == [20]


def test_who_has_no_patience_gives_up_at_once() -> None:
    assert ids(Silence(0.0).begin(ticket(0), 5.0)) == [0]


@pytest.mark.parametrize("of", [1, 2])
def test_what_a_gone_connection_waits_for_is_forgotten(of: int) -> None:
    silence = silent_since(0.0, ticket(0, 1), ticket(1, 2), ticket(2, 1, collection="laws"))
    silence.drop(of)

    assert ids(silence.due(9.0)) == ([1] if of == 1 else [0, 2])
    silence.drop(3 - of)
    assert (silence.pause(9.0), silence.bulk) == (None, 0)
