"""What the queue and the gateway are measured against: the same questions, answered in this process."""

from __future__ import annotations

import time

from ragspec.assembly import make_engine
from ragspec.corpus.embedder import load_embedder
from ragspec.corpus.retriever import load_retriever
from ragspec.decoding.loading import load_configured
from ragspec.decoding.request import Request, Sampling
from ragspec.jobs.options import AnswerOptions
from ragspec.prompt import PromptBuilder
from ragspec.settings import Settings


class Direct:
    """The engine and its marriage with retrieval, called as a library."""

    def __init__(self, settings: Settings, options: AnswerOptions, group: str | None = "job") -> None:
        self._options = options
        self._group = group
        self._target = load_configured(settings)
        self._retriever = load_retriever(settings, load_embedder(settings))
        window = min(settings.context_window, self._target.context_window)
        self._prompts = PromptBuilder(self._target.tokenizer, window, settings.prompt_template, settings.passage_order)
        self._engine = make_engine(settings, self._target)

    def answer(self, questions: list[str]) -> tuple[float, int]:
        """Seconds for all questions, and the tokens written."""
        options = self._options
        tokens = 0
        started = time.perf_counter()
        found = self._retriever.retrieve(questions, options.collection, options.top_k)
        for i, (question, passages) in enumerate(zip(questions, found, strict=True)):
            prompt = self._prompts.build(question, passages, options.max_tokens)
            sampling = Sampling(max_tokens=options.max_tokens)
            self._engine.add(Request(str(i), prompt.token_ids, sampling, prompt.passage_spans, group=self._group))
        while self._engine.has_work:
            tokens += sum(done.completion_tokens for done in self._engine.step())
        return time.perf_counter() - started, tokens
