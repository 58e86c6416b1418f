"""A deterministic engine, retriever and prompt writer, for tests of everything around them.

A prompt is the question's UTF-8 bytes. The engine answers a request with the question, reversed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragspec.corpus.passage import Passage
from ragspec.decoding.acceptance import AcceptanceRecord, Source
from ragspec.decoding.request import Completion, Fresh, Request
from ragspec.errors import InputError
from worker.resident.parts import Parts

MODEL = "stand-in@0123456789abcdef"
STEPS = 4  # of an answer
PASSAGE = Passage("p1", "The sky is blue.", 0.9, "sky.md", "Sky", {"page": 1})


@dataclass(frozen=True, slots=True)
class StandInPrompt:
    token_ids: tuple[int, ...]
    passage_spans: tuple[tuple[int, int], ...]
    used: tuple[Passage, ...]


class StandInPrompts:
    template_hash = "feedfacecafebeef"

    def build(self, question: str, passages: Sequence[Passage], max_tokens: int) -> StandInPrompt:
        if len(question) > 1000:
            raise InputError("The question is too long.", code="question_too_long")
        if "!prompt" in question:
            raise ZeroDivisionError("bad prompt")
        return StandInPrompt(tuple(question.encode()), (), tuple(passages))


class StandInRetriever:
    def __init__(self, found: Callable[[str], list[Passage]] = lambda _: [PASSAGE]) -> None:
        self.found = found
        self.batches: list[list[str]] = []

    def retrieve(self, questions: Sequence[str], collection: str, top_k: int) -> list[list[Passage]]:
        self.batches.append(list(questions))
        return [self.found(question)[:top_k] for question in questions]


class StandInEngine:
    """Decodes `max_batch` requests at a time; `on_step` may sleep, raise or worse, given the questions that run."""

    def __init__(
        self, max_batch: int = 4, on_step: Callable[[list[str]], None] = lambda _: None, steps: int = STEPS
    ) -> None:
        self.steps = 0
        self.fresh: list[Fresh] = []
        self.added: list[Request] = []
        self.cancelled: list[str] = []
        self._max_batch = max_batch
        self._on_step = on_step
        self._steps = steps
        self._left: dict[str, int] = {}
        self._requests: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: Request) -> None:
        if b"!add" in bytes(request.prompt):
            raise InputError("It never fits.", code="prompt_too_long")
        self.added.append(request)
        self._requests[request.id] = request
        self._left[request.id] = self._steps

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._left.pop(request_id, None)

    def step(self) -> list[Completion]:
        batch = list(self._left)[: self._max_batch]
        self._on_step([bytes(self._requests[one].prompt).decode() for one in batch])
        self.steps += 1
        finished = []
        self.fresh = []
        for one in batch:
            self._left[one] -= 1
            if self._requests[one].stream:
                self.fresh.append(self._grown(one))
            if not self._left[one]:
                del self._left[one]
                finished.append(complete(self._requests.pop(one)))
        return finished

    def _grown(self, one: str) -> Fresh:
        """So many bytes of the answer a step as make it whole with the last."""
        answer = bytes(self._requests[one].prompt)[::-1]
        share = -(-len(answer) // self._steps)
        start = share * (self._steps - 1 - self._left[one])
        new = tuple(answer[start : start + share])
        return Fresh(one, start, new, (Source.TARGET,) * len(new))


class StandInStream:
    """Bytes are characters."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._given = 0

    def take(self, tokens: Sequence[int]) -> str:
        self._given += len(tokens)
        return bytes(tokens).decode()

    def close(self, text: str) -> str:
        return text[self._given :]


def complete(request: Request) -> Completion:
    text = bytes(request.prompt).decode()[::-1]
    record = AcceptanceRecord((1, 2, 3), (Source.TARGET, Source.PASSAGE, Source.TARGET), (-0.1, -0.2, -0.3), (2,), (1,))
    return Completion(request.id, text, "stop", record, len(request.prompt), 0.001, 0.002, 0.003)


def stand_in_parts(engine: StandInEngine | None = None, retriever: StandInRetriever | None = None) -> Parts:
    return Parts(engine or StandInEngine(), retriever or StandInRetriever(), StandInPrompts(), MODEL, StandInStream)


def wait_until(true: Callable[[], bool], timeout: float = 20.0) -> None:
    """Return as soon as `true()` holds; fail after `timeout` seconds."""
    give_up_at = time.monotonic() + timeout
    while not true():
        if time.monotonic() > give_up_at:
            raise AssertionError("it never came true")
        time.sleep(0.005)
