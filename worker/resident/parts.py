"""What the pipeline is built from, as it sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragspec.corpus.passage import Passage, Retriever
from ragspec.decoding.request import Completion, Fresh, Request


class DecodingEngine(Protocol):
    """`ragspec.decoding.engine.Engine`, called from one thread."""

    @property
    def has_work(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    @property
    def fresh(self) -> Sequence[Fresh]: ...

    def add(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[Completion]: ...


class TextWriter(Protocol):
    """`ragspec.decoding.streaming.TextStream`, of one answer."""

    def take(self, tokens: Sequence[int]) -> str: ...

    def close(self, text: str) -> str: ...


class BuiltPrompt(Protocol):
    """`ragspec.prompt.builder.Prompt`."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def passage_spans(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def used(self) -> tuple[Passage, ...]: ...


class PromptWriter(Protocol):
    """`ragspec.prompt.builder.PromptBuilder`."""

    @property
    def template_hash(self) -> str: ...

    def build(self, question: str, passages: Sequence[Passage], max_tokens: int) -> BuiltPrompt: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that was loaded.

    Attributes:
        engine: decodes.
        retriever: finds passages.
        prompts: writes prompts.
        model: the target's identity, `name@fingerprint`.
        head: the speculation head's id, or None.
        stream: makes what writes the text of an answer that grows, given its stop strings.
    """

    engine: DecodingEngine
    retriever: Retriever
    prompts: PromptWriter
    model: str
    stream: Callable[[Sequence[str]], TextWriter]
    head: str | None = None
