"""Retrieval and decoding side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.options import AnswerOptions
from tests.worker_stand_in import MODEL, PASSAGE, StandInEngine, StandInRetriever, stand_in_parts, wait_until
from worker.resident.pipeline import LOOKAHEAD_BATCHES, Pipeline
from worker.resident.ticket import Ticket, issue


@dataclass
class Desk:
    """A running pipeline and what came out of it."""

    pipeline: Pipeline = field(init=False)
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def ask(self, idx: int, text: str, connection: int = 1, queue: str = "bulk") -> Ticket:
        options = AnswerOptions(
            collection="docs", queue=queue, temperature=0.5, stop=("\n",), min_tokens=2, logit_bias={3: -1.0}
        )
        ticket = issue(idx, connection, Question(idx, f"q{idx}", text), options, 0.0, "job-1")
        self.pipeline.submit(ticket)
        return ticket

    def texts(self) -> dict[int, str]:
        return {answer.idx: answer.text for _, answer in self.answers}


@contextmanager
def desk(engine: StandInEngine, retriever: StandInRetriever | None = None) -> Iterator[Desk]:
    made = Desk()
    made.pipeline = Pipeline(
        stand_in_parts(engine, retriever),
        max_batch=4,
        answer_without_context=True,
        deliver=lambda connection, answer: made.answers.append((connection, answer)),
        fail=made.failures.append,
    )
    made.pipeline.start()
    try:
        yield made
    finally:
        assert made.pipeline.stop(5.0)


def gate() -> tuple[threading.Event, Callable[[list[str]], None]]:
    opened = threading.Event()
    return opened, lambda _: opened.wait(20) and None


def test_every_question_is_answered_once_to_whom_it_came_from() -> None:
    with desk(StandInEngine()) as made:
        for idx in range(100):
            made.ask(idx, f"question {idx}", connection=idx % 3)
        wait_until(lambda: len(made.answers) == 100)

        assert {(idx % 3, idx) for idx in range(100)} == {(who, answer.idx) for who, answer in made.answers}
        assert all(made.texts()[idx] == f"question {idx}"[::-1] for idx in range(100))
        assert made.pipeline.progress().stalled_s == 0.0


def test_an_answer_carries_who_gave_it_and_how() -> None:
    engine = StandInEngine()
    with desk(engine) as made:
        ticket = made.ask(0, "why?")
        wait_until(lambda: bool(made.answers))

    (_, answer), (request,) = made.answers[0], engine.added
    assert (MODEL, None, "feedfacecafebeef", ticket.seed) == (
        answer.model,
        answer.head,
        answer.template_hash,
        answer.seed,
    )
    assert (ticket.seed, 0.5, ("\n",)) == (request.sampling.seed, request.sampling.temperature, request.sampling.stop)
    assert (request.sampling.min_tokens, request.sampling.logit_bias) == (2, ((3, -1.0),))
    assert request.group == "job-1"
    assert [PASSAGE.id] == [passage["id"] for passage in answer.passages]
    assert (
        answer.token_ids,
        answer.token_sources,
        answer.per_step_drafted,
        answer.per_step_accepted,
    ) == ([1, 2, 3], [0, 1, 0], [2], [1])
    assert (
        answer.num_verify_steps,
        answer.num_draft_tokens,
        answer.num_accepted_draft_tokens,
        answer.acceptance_histogram,
    ) == (1, 2, 1, [0, 1])


def test_no_more_is_prepared_than_the_engine_can_take_soon() -> None:
    opened, hold = gate()
    engine = StandInEngine(on_step=hold)
    with desk(engine) as made:
        for idx in range(200):
            made.ask(idx, f"question {idx}")
        prepared = made.pipeline._preparation.retriever.batches
        most = 4 * LOOKAHEAD_BATCHES + 8  # what waits, and twice the batch that the engine has
        wait_until(lambda: sum(map(len, prepared)) >= most - 2)  # less what is no batch worth retrieving
        at_a_standstill = sum(map(len, prepared))
        held = len(engine.added)
        opened.set()
        wait_until(lambda: len(made.answers) == 200)

    assert at_a_standstill <= most
    assert held <= 8


def test_an_interactive_question_overtakes_the_bulk_that_waits() -> None:
    opened, hold = gate()
    engine = StandInEngine(on_step=hold)
    with desk(engine) as made:
        for idx in range(50):
            made.ask(idx, f"question {idx}")
        wait_until(lambda: made.pipeline.progress().running > 0)
        made.ask(99, "now!", connection=2, queue="interactive")
        # Prepared, all of them: else the engine may be through with the bulk before this one has its passages.
        wait_until(lambda: len(made.pipeline._prepared) + len(engine.added) == 51)
        opened.set()
        wait_until(lambda: len(made.answers) == 51)

    entered = [bytes(request.prompt).decode() for request in engine.added]
    assert entered.index("now!") <= 8


def test_interactive_questions_enter_the_engine_in_the_order_they_came_in() -> None:
    opened, hold = gate()
    engine = StandInEngine(on_step=hold)
    with desk(engine) as made:
        made.ask(0, "first")
        wait_until(lambda: made.pipeline.progress().running == 1)
        for idx in range(1, 6):  # while the engine is at its step, so that all of them enter it together
            made.ask(idx, f"question {idx}", queue="interactive")
        wait_until(lambda: len(made.pipeline._prepared) == 5)
        opened.set()
        wait_until(lambda: len(made.answers) == 6)

    assert [bytes(request.prompt).decode() for request in engine.added[1:]] == [
        f"question {idx}" for idx in range(1, 6)
    ]


def test_what_a_gone_connection_asked_is_dropped_everywhere() -> None:
    opened, hold = gate()
    engine = StandInEngine(on_step=hold)
    with desk(engine) as made:
        for idx in range(20):
            made.ask(idx, f"question {idx}")
        wait_until(lambda: made.pipeline.progress().running > 0)
        held = {request.id for request in engine.added}
        made.pipeline.forget(1)
        made.ask(20, "another", connection=2)
        opened.set()
        wait_until(lambda: bool(made.answers))
        wait_until(lambda: not engine.has_work)

    assert [(who, answer.idx) for who, answer in made.answers] == [(2, 20)]
    assert held <= set(engine.cancelled)


def test_a_prompt_that_the_engine_refuses_fails_alone() -> None:
    with desk(StandInEngine()) as made:
        made.ask(0, "!add")
        made.ask(1, "fine")
        wait_until(lambda: len(made.answers) == 2)

    codes = {answer.idx: answer.error_code for _, answer in made.answers}
    assert codes == {0: "prompt_too_long", 1: None}


def test_an_engine_that_breaks_is_reported_and_answers_nothing() -> None:
    def burst(_: list[str]) -> None:
        raise RuntimeError("device lost")

    with desk(StandInEngine(on_step=burst)) as made:
        made.ask(0, "why?")
        wait_until(lambda: bool(made.failures))

    assert [str(error) for error in made.failures] == ["device lost"]
    assert made.answers == []


def test_an_engine_that_stands_still_shows() -> None:
    opened, hold = gate()
    with desk(StandInEngine(on_step=hold)) as made:
        made.ask(0, "why?")
        wait_until(lambda: made.pipeline.progress().stalled_s > 0.05)
        opened.set()
        wait_until(lambda: bool(made.answers))

        assert made.pipeline.progress().stalled_s == 0.0


@pytest.mark.parametrize("waiting", [True, False])
def test_it_stops_whether_or_not_there_is_work(waiting: bool) -> None:
    with desk(StandInEngine()) as made:
        for idx in range(100 if waiting else 0):
            made.ask(idx, "why?")
