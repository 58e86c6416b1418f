"""In which order prepared questions enter the engine."""

from __future__ import annotations

import random

from ragspec.jobs.answer import Question
from ragspec.jobs.options import AnswerOptions
from tests.worker_stand_in import StandInPrompt
from worker.resident.feed import Feed
from worker.resident.preparation import Prepared
from worker.resident.ticket import issue


def prepared(number: int, passages: str, connection: int = 1, queue: str = "bulk") -> Prepared:
    """A question whose prompt is one token a passage, then its number."""
    options = AnswerOptions(collection="docs", queue=queue)
    ticket = issue(number, connection, Question(number, f"q{number}", "?"), options, 0.0)
    spans = tuple((place, place + 1) for place in reversed(range(len(passages))))
    return Prepared(ticket, StandInPrompt((*passages.encode(), 1000 + number), spans, ()), 0.0)


def feed(*waiting: Prepared, group_limit: int = 8) -> Feed:
    made = Feed(group_limit)
    for one in waiting:
        made.put(one)
    return made


def numbers(taken: list[Prepared]) -> list[int]:
    return [int(one.ticket.id) for one in taken]


def test_those_that_begin_alike_follow_the_oldest() -> None:
    """Among them, those that share more are neighbours."""
    made = feed(prepared(0, "ac"), prepared(1, "b"), prepared(2, "ab"), prepared(3, "ac"), prepared(4, "b"))

    assert numbers(made.take(10)) == [2, 0, 3, 1, 4]
    assert len(made) == 0


def test_questions_without_passages_keep_their_order() -> None:
    assert numbers(feed(*(prepared(number, "") for number in range(5))).take(5)) == [0, 1, 2, 3, 4]


def test_connections_lead_in_turn() -> None:
    """A connection with much to ask delays another's question by one group, not by all it has."""
    waiting = [prepared(number, chr(97 + number % 3)) for number in range(30)]
    made = feed(*waiting, prepared(30, "z", connection=2), group_limit=4)

    assert numbers(made.take(31)).index(30) == 4


def test_a_group_has_a_limit_and_takes_its_oldest() -> None:
    made = feed(*(prepared(number, "a") for number in range(6)), prepared(6, "b"), group_limit=4)

    assert numbers(made.take(4)) == [0, 1, 2, 3]
    assert numbers(made.take(9)) == [4, 5, 6]


def test_interactive_questions_go_first_and_have_no_limit() -> None:
    made = feed(prepared(0, "a"), prepared(1, "b", queue="interactive"), prepared(2, "a", queue="interactive"))

    assert numbers(made.take(0)) == [1, 2]
    assert (len(made), made.bulk) == (1, 1)


def test_what_a_gone_connection_waits_for_is_forgotten() -> None:
    """Also what is lined up already."""
    made = feed(
        prepared(0, "a"),
        prepared(1, "a", connection=2),
        prepared(2, "a"),
        prepared(3, "b"),
        prepared(4, "c", queue="interactive"),
    )
    assert numbers(made.take(1)) == [4, 0]
    made.drop(1)

    assert numbers(made.take(9)) == [1]
    assert len(made) == 0
    assert made._groups == made._lines == {}


def test_every_question_comes_out_once_whatever_happens() -> None:
    rng = random.Random(3)
    made, taken, dropped = Feed(5), [], set()
    for number in range(400):
        made.put(
            prepared(
                number,
                rng.choice(["", "a", "ab", "b", "ba"]),
                rng.randrange(4),
                rng.choice(["bulk"] * 9 + ["interactive"]),
            )
        )
        if rng.random() < 0.3:
            taken += made.take(rng.randint(0, 4))
        if rng.random() < 0.02:
            connection = rng.randrange(4)
            dropped |= {n for n in range(number + 1) if n not in numbers(taken)}
            made.drop(connection)
    taken += made.take(1000)

    assert len(numbers(taken)) == len(set(numbers(taken)))
    assert set(range(400)) - set(numbers(taken)) <= dropped
    assert len(made) == 0
