"""Chroma is stopped and started again while questions wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ragspec.corpus.retriever import ChromaRetriever
from ragspec.corpus.store import open_store
from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.options import AnswerOptions
from ragspec.services.child import running
from ragspec.services.chroma import chroma_part
from ragspec.settings import load_settings
from tests.worker_stand_in import StandInEngine, stand_in_parts, wait_until
from worker.resident.pipeline import Pipeline
from worker.resident.ticket import issue

pytestmark = pytest.mark.services
QUESTIONS = 100


class Compass:
    """An embedder for which everything lies in one direction."""

    name = "compass@0123456789abcdef"

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.tile(np.array([1.0, 0.0], np.float32), (len(texts), 1))


@contextmanager
def answering(retriever: ChromaRetriever, answers: list[Answer]) -> Iterator[Pipeline]:
    """A pipeline with a stand-in engine; it collects what it answers."""
    pipeline = Pipeline(
        stand_in_parts(StandInEngine(), retriever),
        max_batch=8,
        answer_without_context=False,
        deliver=lambda _, answer: answers.append(answer),
        tell=lambda _, grown: pytest.fail(str(grown)),
        fail=lambda error: pytest.fail(str(error)),
    )
    pipeline.start()
    try:
        yield pipeline
    finally:
        assert pipeline.stop(5.0)


def ask(pipeline: Pipeline, idx: int, **chosen: object) -> None:
    options = AnswerOptions(**{"collection": "docs", **chosen})
    pipeline.submit(issue(idx, idx % 3, Question(idx, f"q{idx}", f"question {idx}"), options, 0.0))


def test_a_store_that_is_started_again_costs_no_answer_and_holds_up_nobody_else(tmp_path: Path) -> None:
    chroma = chroma_part(tmp_path / "chroma", tmp_path / "chroma.log")
    answers: list[Answer] = []
    with ExitStack() as first_run, ExitStack() as rest:
        first_run.enter_context(running([chroma]))
        store = rest.enter_context(open_store(load_settings(chroma_url=chroma.url)))
        store.create("docs", Compass.name, 2).upsert(ids=["a"], embeddings=[[1.0, 0.0]], documents=["x"])
        pipeline = rest.enter_context(answering(ChromaRetriever(store, Compass()), answers))
        ask(pipeline, 0)
        wait_until(lambda: len(answers) == 1)

        first_run.close()
        for idx in range(1, QUESTIONS):
            ask(pipeline, idx)
        wait_until(lambda: pipeline.progress().waiting == QUESTIONS - 1)
        ask(pipeline, QUESTIONS, top_k=0)
        wait_until(lambda: len(answers) == 2)
        assert answers[1].idx == QUESTIONS

        rest.enter_context(running([chroma]))
        wait_until(lambda: len(answers) > QUESTIONS, 60)

    assert Counter(answer.idx for answer in answers) == Counter(range(QUESTIONS + 1))
    assert {answer.status for answer in answers} == {"completed"}
    assert all([passage["id"] for passage in answer.passages] == ["a"] for answer in answers if answer.idx < QUESTIONS)
