"""Single questions of a gateway, through real Redis and real processes; only the model is a stand-in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from ragspec.asking.events import EVENTS, REPLIES, Delta, Finished, Rejected, Started
from ragspec.asking.message import CANCELLED, AskMessage, gone_key
from ragspec.jobs.options import AnswerOptions
from ragspec.queue import ASK, ASKS, send_ask, waiting
from tests.integration.worker.yard import Yard, engine_is_idle
from tests.worker_stand_in import MODEL

pytestmark = pytest.mark.services

OPTIONS = AnswerOptions(collection="handbook", queue="interactive")


class Gateway:
    """Asks, and reads its stream."""

    def __init__(self, yard: Yard) -> None:
        self.yard = yard
        self.stream = REPLIES + uuid4().hex
        self.heard: dict[str, list[Any]] = {}
        self._last = b"0"

    def ask(self, question: str, *, seconds: float = 30.0, stream: bool = True, name: str = "") -> str:
        now = time.time()
        message = AskMessage(
            id=name or uuid4().hex,
            question=question,
            options=OPTIONS,
            stream=stream,
            reply_to=self.stream,
            sent_at=now,
            deadline=now + seconds,
        )
        send_ask(self.yard.app, message)
        return message.id

    def cancel(self, name: str) -> None:
        self.yard.redis.set(gone_key(name), "", ex=30)
        self.yard.redis.publish(CANCELLED, name)

    def listen(self) -> dict[str, list[Any]]:
        for _, entries in self.yard.redis.xread({self.stream: self._last}):
            for self._last, entry in entries:
                name = entry[b"id"].decode()
                self.heard.setdefault(name, []).append(EVENTS.validate_json(entry[b"event"]))
        return self.heard

    def over(self, name: str) -> bool:
        events = self.listen().get(name, [])
        return bool(events) and isinstance(events[-1], Finished | Rejected)

    def until_over(self, name: str) -> list[Any]:
        self.yard.until(lambda: self.over(name), 30)
        return self.heard[name]


@pytest.fixture
def gateway(steady_yard: Yard) -> Iterator[Gateway]:
    made = Gateway(steady_yard)
    yield made
    steady_yard.redis.delete(made.stream)


def test_an_answer_is_told_while_it_is_written(gateway: Gateway) -> None:
    gateway.yard.a_worker()
    started, *deltas, finished = gateway.until_over(gateway.ask("what is the colour of the sky?"))

    assert isinstance(started, Started)
    assert started.model == MODEL
    assert len(deltas) > 1
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert [delta.start for delta in deltas] == [
        sum(len(before.tokens) for before in deltas[:i]) for i in range(len(deltas))
    ]
    assert "".join(delta.text for delta in deltas) == finished.answer.text == "?yks eht fo ruoloc eht si tahw"
    assert {source for delta in deltas for source in delta.sources} == {"target"}
    assert finished.answer.passages[0]["id"] == "p1"
    assert 0 < gateway.yard.redis.ttl(gateway.stream) <= 600

    silent = gateway.until_over(gateway.ask("and now?", stream=False))
    assert [type(event) for event in silent] == [Started, Finished]


def test_many_are_answered_at_once_and_each_gets_its_own(gateway: Gateway) -> None:
    gateway.yard.a_worker()
    asked = {gateway.ask(f"question {number}"): f"question {number}" for number in range(60)}

    for name, question in asked.items():
        assert gateway.until_over(name)[-1].answer.text == question[::-1]


def test_a_question_that_nobody_waits_for_leaves_the_engine(gateway: Gateway) -> None:
    yard, worker = gateway.yard, gateway.yard.a_worker()
    yard.behave(step_s=1.0)
    name = gateway.ask("a long one")
    yard.until(lambda: any(isinstance(event, Delta) for event in gateway.listen().get(name, [])), 30)
    gateway.cancel(name)

    assert gateway.until_over(name)[-1] == Rejected(code="cancelled", message="Nobody waits for the answer any more.")
    yard.until(lambda: engine_is_idle(worker), 10)


def test_a_question_that_was_given_up_before_a_worker_had_it_is_not_begun(gateway: Gateway) -> None:
    gateway.yard.a_worker()
    gateway.cancel(name := uuid4().hex)
    gateway.ask("never mind", name=name)

    (only,) = gateway.until_over(name)
    assert only.code == "cancelled"


def test_an_answer_that_is_late_is_not_waited_for(gateway: Gateway) -> None:
    worker = gateway.yard.a_worker()
    gateway.yard.behave(step_s=1.0)
    *_, last = gateway.until_over(gateway.ask("a long one", seconds=1.5))

    assert last.code == "deadline_exceeded"
    gateway.yard.until(lambda: engine_is_idle(worker), 10)


def test_a_question_whose_deadline_passed_in_the_queue_is_not_begun(gateway: Gateway) -> None:
    gateway.yard.a_worker()
    name = gateway.ask("too late", seconds=-1.0)

    gateway.until_over(gateway.ask("in time"))
    gateway.yard.until(lambda: waiting(gateway.yard.app)[ASKS] == 0, 20)
    assert not any(isinstance(event, Started) for event in gateway.heard.get(name, []))


def test_a_question_that_kills_every_engine_is_given_up_and_the_others_are_answered(gateway: Gateway) -> None:
    gateway.yard.a_worker()
    gateway.yard.behave(die_at="poison")

    assert gateway.until_over(gateway.ask("poison"))[-1].code == "engine_lost"
    assert gateway.until_over(gateway.ask("wholesome"))[-1].answer.text == "emoselohw"


def test_a_worker_that_stops_hands_its_questions_on(gateway: Gateway) -> None:
    """The next begins from the beginning, and says again what was said."""
    yard, first = gateway.yard, gateway.yard.a_worker()
    yard.behave(step_s=1.0)
    name = gateway.ask("a question in many steps")
    yard.until(lambda: any(isinstance(event, Delta) for event in gateway.listen().get(name, [])), 30)
    assert first.stop() == 0
    yard.behave(step_s=0.02)
    yard.a_worker()

    events = gateway.until_over(name)
    assert sum(isinstance(event, Started) for event in events) == 2
    assert events[-1].answer.text == "spets ynam ni noitseuq a"
    again = next(i for i, event in enumerate(events) if i and isinstance(event, Started))
    assert events[again + 1].start == 0


def test_a_message_that_asks_nothing_stops_nobody(gateway: Gateway) -> None:
    gateway.yard.a_worker()
    for message in ({}, {"id": "x"}, {"id": 5, "question": ""}, "nonsense", None):
        gateway.yard.app.send_task(ASK, kwargs={"message": message}, queue=ASKS)

    assert gateway.until_over(gateway.ask("still there?"))[-1].answer.text == "?ereht llits"
