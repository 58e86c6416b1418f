"""Retrieval and decoding side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest

from ragspec.corpus.passage import Passage
from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.options import AnswerOptions
from tests.worker_stand_in import MODEL, PASSAGE, STEPS, StandInEngine, StandInRetriever, stand_in_parts, wait_until
from worker.protocol import Grown
from worker.resident.pipeline import LOOKAHEAD_BATCHES, RETRIEVAL_BATCH, Pipeline
from worker.resident.silence import _Silent
from worker.resident.ticket import Ticket, issue


@dataclass
class Desk:
    """A running pipeline and what came out of it."""

    pipeline: Pipeline = field(init=False)
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    grown: list[tuple[int, Grown]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def ask(self, idx: int, text: str, connection: int = 1, *, stream: bool = False, **chosen: object) -> Ticket:
        common = {"collection": "docs", "temperature": 0.5, "stop": ("\n",), "min_tokens": 2, "logit_bias": {3: -1.0}}
        options = AnswerOptions(**common | chosen)
        ticket = issue(idx, connection, Question(idx, f"q{idx}", text), options, 0.0, "job-1", stream=stream)
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
        tell=lambda connection, grown: made.grown.append((connection, grown)),
        fail=made.failures.append,
    )
    made.pipeline.start()
    try:
        yield made
    finally:
        assert made.pipeline.stop(5.0)


class Moody(StandInRetriever):
    """Silent for some collections, after `hold`; `asked` says who of them was asked for, by how many questions."""

    def __init__(self, *silent: str, hold: Callable[[list[str]], None] = lambda _: None) -> None:
        super().__init__()
        self.silent = set(silent)
        self.hold = hold
        self.asked: list[tuple[str, int]] = []

    def retrieve(self, questions: Sequence[str], collection: str, top_k: int) -> list[list[Passage]]:
        if collection in self.silent:
            self.asked.append((collection, len(questions)))
            self.hold(list(questions))
            raise ServiceUnavailableError(f"Chroma does not answer from {collection}.")
        return super().retrieve(questions, collection, top_k)


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


def test_an_answer_that_is_streamed_is_told_while_it_grows() -> None:
    with desk(StandInEngine()) as made:
        made.ask(0, "a question of some length", connection=1, stream=True)
        made.ask(1, "another one, not streamed", connection=1)
        made.ask(2, "a third one", connection=2, stream=True)
        wait_until(lambda: len(made.answers) == 3)

    for connection, idx in ((1, 0), (2, 2)):
        told = [grown for who, grown in made.grown if who == connection]
        assert {grown.idx for grown in told} == {idx}
        assert len(told) == STEPS
        assert "".join(grown.text for grown in told) == made.texts()[idx]
        assert [grown.start for grown in told] == [sum(len(one.tokens) for one in told[:i]) for i in range(STEPS)]


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


def test_a_silent_collection_holds_up_only_its_own_questions() -> None:
    """Whoever needs no store, or another collection, passes; then all others are answered, each once."""
    retriever = Moody("docs")
    with desk(StandInEngine(), retriever) as made:
        for idx in range(50):
            made.ask(idx, f"question {idx}", connection=idx % 2)
        wait_until(lambda: len(retriever.asked) > 1)
        passing = {
            50: {"top_k": 0},
            51: {"collection": "laws"},
            52: {"collection": "laws", "queue": "interactive"},
            53: {"top_k": 0, "queue": "interactive"},
        }
        for idx, chosen in passing.items():
            made.ask(idx, f"question {idx}", connection=idx % 2, **chosen)
        wait_until(lambda: len(made.answers) == len(passing))
        assert made.texts().keys() == passing.keys()
        # One question asked each time, but for the batch that found out.
        assert all(questions == 1 for _, questions in retriever.asked[1:])

        retriever.silent.clear()
        wait_until(lambda: len(made.answers) >= 54)
        assert made.texts() == {idx: f"question {idx}"[::-1] for idx in range(54)}
        assert len(made.answers) == 54
        assert {answer.status for _, answer in made.answers} == {"completed"}


def test_interactive_questions_are_the_first_once_their_store_answers_again() -> None:
    retriever = Moody("docs")
    with desk(StandInEngine(), retriever) as made:
        for idx in range(40):
            made.ask(idx, f"question {idx}")
        wait_until(lambda: bool(retriever.asked))
        made.ask(40, "now!", queue="interactive")
        wait_until(lambda: len(retriever.asked) > 2)
        retriever.silent.clear()
        wait_until(lambda: len(made.answers) == 41)

    (asking, first, *_) = retriever.batches
    assert asking == ["question 0"]
    assert first[:2] == ["now!", "question 1"]
    assert [text for batch in retriever.batches for text in batch if text != "now!"] == [
        f"question {idx}" for idx in range(40)
    ]


def test_an_interactive_question_asks_its_store_again_before_bulk_is_looked_up() -> None:
    opened, hold = gate()
    retriever = Moody("docs")
    retriever.found = lambda question: [PASSAGE] if question != "slow" else hold([]) or [PASSAGE]
    with desk(StandInEngine(), retriever) as made:
        made.ask(0, "now!", queue="interactive")
        wait_until(lambda: bool(retriever.asked))
        made.ask(1, "slow", collection="laws")
        wait_until(lambda: ["slow"] in retriever.batches)
        made.ask(2, "bulk", collection="laws")
        retriever.silent.clear()
        wait_until(lambda: bool(made.pipeline._silence.due(time.monotonic())))
        opened.set()
        wait_until(lambda: len(made.answers) == 3)

    assert retriever.batches == [["slow"], ["now!"], ["bulk"]]


def test_questions_that_wait_for_their_store_count_as_prepared() -> None:
    retriever = Moody("docs")
    lookahead = 4 * LOOKAHEAD_BATCHES
    with desk(StandInEngine(), retriever) as made:
        for idx in range(lookahead + 50):
            made.ask(idx, f"question {idx}")
        wait_until(lambda: len(retriever.asked) > 2)
        made.ask(1000, "now!", top_k=0, queue="interactive")
        wait_until(lambda: bool(made.answers))

        assert lookahead - 2 <= made.pipeline._silence.bulk <= lookahead
        assert len(made.answers) == 1


def test_questions_whose_store_stays_silent_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.resident.pipeline.PATIENCE_S", 0.3)
    retriever = Moody("docs")
    with desk(StandInEngine(), retriever) as made:
        for idx in range(40):
            made.ask(idx, f"question {idx}")
        made.ask(40, "another", collection="laws")
        wait_until(lambda: len(made.answers) == 41)
        retriever.silent.clear()
        made.ask(41, "later")
        wait_until(lambda: len(made.answers) == 42)

    codes = {answer.idx: answer.error_code for _, answer in made.answers}
    assert codes == {**dict.fromkeys(range(40), "retrieval_failed"), 40: None, 41: None}
    messages = {answer.error_message for _, answer in made.answers if answer.error_code}
    assert messages == {"Chroma does not answer from docs."}
    assert len(retriever.asked) > 1


def test_what_a_gone_connection_waits_for_at_a_silent_store_is_dropped() -> None:
    retriever = Moody("docs")
    with desk(StandInEngine(), retriever) as made:
        for idx in range(10):
            made.ask(idx, f"question {idx}", connection=1 + idx % 2)
        wait_until(lambda: made.pipeline._silence.bulk == 10)
        made.pipeline.forget(1)
        assert made.pipeline._silence.bulk == 5
        retriever.silent.clear()
        wait_until(lambda: len(made.answers) == 5)

        assert {who for who, _ in made.answers} == {2}
        assert made.pipeline.progress().waiting == 0


def test_what_a_connection_asked_that_goes_while_the_store_is_asked_waits_for_nothing() -> None:
    opened, hold = gate()
    retriever = Moody("docs", hold=hold)
    with desk(StandInEngine(), retriever) as made:
        made.ask(0, "why?")
        wait_until(lambda: bool(retriever.asked))
        made.pipeline.forget(1)
        made.ask(1, "another", connection=2, top_k=0)
        opened.set()
        wait_until(lambda: bool(made.answers))

        assert made.pipeline._silence.bulk == 0


@pytest.fixture
def long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent store is asked again after the end of the test."""
    monkeypatch.setattr("worker.resident.pipeline.PATIENCE_S", 2000.0)
    monkeypatch.setattr("worker.resident.silence._Silent", partial(_Silent, pause_s=1000.0))


@pytest.mark.usefixtures("long_pause")
def test_many_questions_for_a_silent_store_hide_none_behind_them() -> None:
    opened, hold = gate()
    retriever = Moody("docs", hold=hold)
    with desk(StandInEngine(), retriever) as made:
        made.ask(0, "why?")
        wait_until(lambda: bool(retriever.asked))
        for idx in range(1, RETRIEVAL_BATCH + 10):
            made.ask(idx, f"question {idx}")
        made.ask(100, "another", top_k=0)
        opened.set()
        wait_until(lambda: bool(made.answers))

    assert list(made.texts()) == [100]


@pytest.mark.usefixtures("long_pause")
def test_a_stop_ends_the_wait_for_a_silent_store() -> None:
    retriever = Moody("docs")
    with desk(StandInEngine(), retriever) as made:
        made.ask(0, "why?")
        wait_until(lambda: made.pipeline._silence.bulk == 1)

    assert made.answers == []


@pytest.mark.parametrize("waiting", [True, False])
def test_it_stops_whether_or_not_there_is_work(waiting: bool) -> None:
    with desk(StandInEngine()) as made:
        for idx in range(100 if waiting else 0):
            made.ask(idx, "why?")
