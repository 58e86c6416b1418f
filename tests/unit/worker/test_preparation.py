"""From questions to prompts: one row's fault stays that row's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ragspec.corpus.passage import Passage
from ragspec.errors import NotFoundError, RefusedError, ServiceUnavailableError
from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.options import AnswerOptions
from tests.worker_stand_in import PASSAGE, StandInPrompts, StandInRetriever
from worker.resident.outcome import NO_CONTEXT_TEXT, Identity
from worker.resident.preparation import Outcome, Preparation, Prepared
from worker.resident.ticket import Ticket, issue

IDENTITY = Identity("model@1", None, "feedfacecafebeef")


def ticket(text: str, idx: int = 0, **options: object) -> Ticket:
    job = AnswerOptions(**{"collection": "docs", **options})
    return issue(idx, 1, Question(idx, f"q{idx}", text), job, 0.0)


def prepare(
    tickets: list[Ticket], retriever: object = None, *, answer_without_context: bool = True
) -> dict[str, Outcome]:
    preparation = Preparation(retriever or StandInRetriever(), StandInPrompts(), IDENTITY, answer_without_context)
    return {one.id: outcome for one, outcome in preparation.prepare(tickets)}


class Failing:
    """Fails with each of `errors` in turn, then finds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def retrieve(self, questions: Sequence[str], collection: str, top_k: int) -> list[list[Passage]]:
        if self.errors:
            raise self.errors.pop(0)
        return [[PASSAGE] for _ in questions]


class Naming:
    """Finds passages whose ids tell what was asked for."""

    def retrieve(self, questions: Sequence[str], collection: str, top_k: int) -> list[list[Passage]]:
        return [
            [replace(PASSAGE, id=f"{collection} {rank} for {question}") for rank in range(top_k)]
            for question in questions
        ]


def test_questions_of_one_collection_and_top_k_are_retrieved_together() -> None:
    retriever = StandInRetriever()
    prepare([ticket("a", 0), ticket("b", 1, top_k=1), ticket("c", 2)], retriever)

    assert retriever.batches == [["a", "c"], ["b"]]


def test_rows_of_one_batch_get_passages_of_their_own_collection_and_number() -> None:
    wanted = [("docs", 2), ("docs", 1), ("laws", 2), ("docs", 2), ("docs", 0)]
    tickets = [ticket(f"{idx}", idx, collection=name, top_k=top_k) for idx, (name, top_k) in enumerate(wanted)]

    outcomes = prepare(tickets, Naming())

    used = [[passage.id for passage in outcomes[f"{idx}"].prompt.used] for idx in range(len(wanted))]
    assert used == [[f"{name} {rank} for {idx}" for rank in range(k)] for idx, (name, k) in enumerate(wanted)]


def test_no_passages_are_asked_for_where_top_k_is_0() -> None:
    retriever = StandInRetriever()
    outcome = prepare([ticket("a", top_k=0)], retriever, answer_without_context=False)["0"]

    assert retriever.batches == []
    assert isinstance(outcome, Prepared)


def test_a_question_with_nothing_retrieved_ends_where_the_setting_says_so() -> None:
    nothing = StandInRetriever(found=lambda _: [])
    answer = prepare([ticket("a")], nothing, answer_without_context=False)["0"]

    assert (answer.status, answer.finish_reason, answer.text) == ("completed", "no_context", NO_CONTEXT_TEXT)
    assert (answer.model, answer.template_hash) == ("model@1", "feedfacecafebeef")
    assert isinstance(prepare([ticket("a")], nothing)["0"], Prepared)


def test_a_store_that_does_not_answer_is_asked_once_and_ends_no_row() -> None:
    away = ServiceUnavailableError("Chroma does not answer.")
    others = [ticket("b", 1), ticket("c", 2, collection="laws")]

    outcomes = prepare([ticket("a", 0), *others], Failing(away))

    assert (outcomes["0"], outcomes["1"]) == (away, away)
    assert isinstance(outcomes["2"], Prepared)


def test_who_asks_for_no_passages_waits_for_no_search() -> None:
    retriever = StandInRetriever()
    preparation = Preparation(retriever, StandInPrompts(), IDENTITY, answer_without_context=True)

    prepared = preparation.prepare([ticket("a", 0), ticket("b", 1, top_k=0), ticket("c", 2, top_k=0)])

    assert [next(prepared)[0].id, next(prepared)[0].id, retriever.batches] == ["1", "2", []]
    assert [one.id for one, _ in prepared] == ["0"]


def test_a_missing_collection_fails_with_its_own_code() -> None:
    missing = NotFoundError("No collection docs.", code="unknown_collection")

    assert prepare([ticket("a")], Failing(missing))["0"].error_code == "unknown_collection"


def test_one_question_that_breaks_the_retriever_fails_alone() -> None:
    def found(question: str) -> list[Passage]:
        if question == "bad":
            raise ZeroDivisionError("bad vector")
        return [PASSAGE]

    outcomes = prepare([ticket("a", 0), ticket("bad", 1), ticket("c", 2)], StandInRetriever(found))

    assert [Prepared, Answer, Prepared] == [type(outcomes[key]) for key in "012"]
    assert (
        outcomes["1"].error_code,
        outcomes["1"].error_message,
    ) == ("internal_error", "ZeroDivisionError: bad vector")


def test_one_question_that_the_store_refuses_fails_alone_and_at_once() -> None:
    def found(question: str) -> list[Passage]:
        if question == "bad":
            raise RefusedError("Chroma refuses.")
        return [PASSAGE]

    retriever = StandInRetriever(found)
    outcomes = prepare([ticket("a", 0), ticket("bad", 1), ticket("c", 2)], retriever)

    assert [Prepared, Answer, Prepared] == [type(outcomes[key]) for key in "012"]
    assert outcomes["1"].error_code == "retrieval_failed"
    assert retriever.batches == [["a", "bad", "c"], ["a"], ["bad"], ["c"]]  # nothing was asked twice


@pytest.mark.parametrize(("text", "code"), [("x" * 2000, "question_too_long"), ("!prompt", "internal_error")])
def test_a_question_without_a_prompt_fails_alone(text: str, code: str) -> None:
    outcomes = prepare([ticket(text, 0), ticket("fine", 1)])

    assert code == outcomes["0"].error_code
    assert isinstance(outcomes["1"], Prepared)
