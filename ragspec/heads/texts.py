"""Prompts for a head's training text.

`TopicTexts` needs nothing but the target: it has it write short texts about a list of topics, and then answer questions about
them, with those texts as passages and without. `corpus_requests` takes a user's own passages and questions.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragspec.corpus.passage import Passage, Retriever
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from ragspec.errors import InputError
from ragspec.heads.recording import record
from ragspec.prompt import PromptBuilder

#: Most tokens of a text and of an answer. Both are greedy, as answers are in use.
_TEXT, _ANSWER = 220, 128
#: How questions about a text are asked for, and their most tokens.
_ASK = "{text}\n\nWrite one short question that this text answers. Write only the question."
_QUESTION = 32
#: Questions whose passages are looked up together.
_RETRIEVED = 64
#: How texts are asked for, in turns.
_FORMS = (
    "Write a paragraph of an encyclopedia about {name}: {aspect}.",
    "Tell me about {name}: {aspect}.",
    "Write a short news article that has to do with {name} ({aspect}).",
    "Explain {name}, in particular {aspect}, with names, dates and numbers.",
)


@dataclass(frozen=True, slots=True)
class PromptName:
    """What a prompt is called while it is answered.

    Attributes:
        kind: of prompt.
        number: of its text or question.
        key: what it is about; see `AnswerWriter.add`.
    """

    kind: str
    number: int
    key: str

    def __str__(self) -> str:
        """As a request's id."""
        return f"{self.kind}-{self.number}-{self.key}"

    @classmethod
    def parse(cls, name: str) -> PromptName:
        """Back out of a request's id."""
        kind, number, key = name.split("-", 2)
        return cls(kind, int(number), key)


@dataclass(frozen=True, slots=True)
class Topic:
    """Something to write about."""

    name: str
    aspect: str
    questions: tuple[str, ...]

    @property
    def title(self) -> str:
        """As a passage's title."""
        return f"{self.name}: {self.aspect}"


def read_topics() -> list[Topic]:
    """Those of `topics.txt`."""
    topics = []
    for line in (resources.files("ragspec.heads") / "topics.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            _, aspects, questions, names = ([part.strip() for part in cell.split(";")] for cell in line.split("|"))
            topics += [
                Topic(name.strip(), aspect, tuple(question.format(name.strip()) for question in questions))
                for name in names[0].split(",")
                for aspect in aspects
            ]
    return topics


class TopicTexts:
    """Prompts about topics, in two stages; the second needs what the target wrote in the first.

    Args:
        tokenizer: the target's.
        builder: for the retrieval-augmented prompts.
        topics: what about.
        seed: of which questions are asked and which passages go together.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, builder: PromptBuilder, topics: Sequence[Topic], seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._builder = builder
        self._topics = topics
        self._random = random.Random(seed)  # noqa: S311 - nothing secret

    def texts(self) -> Iterator[Request]:
        """A short text about each topic, in one of several forms."""
        for i, topic in enumerate(self._topics):
            text = _FORMS[i % len(_FORMS)].format(name=topic.name, aspect=topic.aspect)
            yield self._request("text", i, text, _TEXT)

    def answers(self, texts: Mapping[int, str]) -> Iterator[Request]:
        """Answers from passages, in the project's template and in another, and from memory; summaries.

        Args:
            texts: by the topic's place.
        """
        order = list(texts)
        for place, i in enumerate(order):
            asked, recalled = (self._random.choice(self._topics[i].questions) for _ in range(2))
            near = [order[(place + step) % len(order)] for step in range(1, self._random.randint(1, 3))]
            passages = [Passage(str(j), texts[j], 0.0, str(j), title=self._topics[j].title) for j in (i, *near)]
            prompt = self._builder.build(asked, passages, _ANSWER)
            yield Request(
                str(PromptName("rag", i, self._topics[i].name)), prompt.token_ids, Sampling(max_tokens=_ANSWER)
            )
            if place % 2:
                shuffled = self._random.sample(passages, len(passages))
                yield self._request("context", i, f"{_body(shuffled)}\n\n{asked}", _ANSWER)
            else:
                yield self._request("summary", i, _summarise(passages), _ANSWER)
            yield self._request("qa", i, recalled, _ANSWER)

    def _request(self, kind: str, number: int, text: str, max_tokens: int) -> Request:
        request_id = str(PromptName(kind, number, self._topics[number].name))
        return Request(request_id, chat_tokens(self._tokenizer, text), Sampling(max_tokens=max_tokens))


def corpus_requests(
    tokenizer: PreTrainedTokenizerBase,
    builder: PromptBuilder,
    retriever: Retriever,
    collection: str,
    questions: Iterable[str],
    top_k: int,
    max_tokens: int,
) -> Iterator[Request]:
    """For each question, with the passages that a collection has for it: the same four kinds of prompt."""
    sampling = Sampling(max_tokens=max_tokens)
    number = 0
    for batch in _batches(questions):
        for question, passages in zip(batch, retriever.retrieve(batch, collection, top_k), strict=True):
            number += 1
            try:
                yield Request(
                    str(PromptName("rag", number, question)),
                    builder.build(question, passages, max_tokens).token_ids,
                    sampling,
                )
            except InputError:
                continue  # a question that leaves no room for an answer
            for kind, text in (
                ("context", f"{_body(passages)}\n\n{question}"),
                ("summary", _summarise(passages)),
                ("qa", question),
            ):
                yield Request(str(PromptName(kind, number, question)), chat_tokens(tokenizer, text), sampling)


def _body(passages: Sequence[Passage]) -> str:
    return "\n".join(f"{passage.title}\n{passage.text}" for passage in passages)


def _summarise(passages: Sequence[Passage]) -> str:
    return f"Summarize: {' '.join(passage.text for passage in passages)}"


def written_questions(target: Target, texts: Iterable[str], *, batch: int, window: int) -> Iterator[str]:
    """A question about each text, by the target itself; only as good as the target is at asking."""
    asks = (
        Request(f"question-{i}", chat_tokens(target.tokenizer, _ASK.format(text=text)), Sampling(max_tokens=_QUESTION))
        for i, text in enumerate(texts)
    )
    for recording in record(target, asks, batch=batch, window=window):
        question = recording.text.strip().split("\n")[0]
        if question:
            yield question


def _batches(questions: Iterable[str]) -> Iterator[list[str]]:
    waiting = iter(questions)
    while batch := list(islice(waiting, _RETRIEVED)):
        yield batch


def chat_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """A user's message in the target's chat template, up to where the answer begins."""
    if not getattr(tokenizer, "chat_template", None):
        return tuple(tokenizer(text)["input_ids"])
    messages: Any = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(str(rendered), add_special_tokens=False)["input_ids"])
