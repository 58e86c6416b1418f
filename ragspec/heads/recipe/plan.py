"""Which prompts the target answers about the documents, and how many."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ragspec.corpus.passage import Passage
from ragspec.decoding.request import Request, Sampling
from ragspec.errors import InputError
from ragspec.heads.recipe.documents import Document
from ragspec.heads.recipe.exclusion import Exclusion
from ragspec.heads.recipe.questions import ask
from ragspec.heads.store import HELD_BACK, is_held_back
from ragspec.heads.texts import PromptName, Topic, chat_tokens, read_topics
from ragspec.prompt import PromptBuilder

#: Most tokens of an answer.
ANSWER = 128
#: The kinds of prompt, in turns, so that each has an equal share: from passages in the project's template and in another,
#: a summary, and from memory.
_KINDS = ("rag", "summary", "qa", "context")
#: Passages of a prompt at most: of one with a question, and of a summary.
_PASSAGES, _SUMMARISED = 3, 4
#: How summaries are asked for.
_SUMMARISE = (
    "Summarize: {text}",
    "Summarize the following text in a few sentences.\n\n{text}",
    "{text}\n\nWrite a short summary of this.",
    "What are the main points of this text?\n\n{text}",
)
#: How passages and a question stand together, in turns, beside the project's own template.
_CONTEXT = (
    "{text}\n\n{question}",
    "Context:\n{text}\n\nQuestion: {question}\nAnswer:",
    "Answer the question by the text.\n\n{text}\n\n{question}",
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of one source, and how they are asked about.

    Attributes:
        documents: what there is.
        share: of the prompts, beside those of others.
        asks: templates of questions over a passage; see `ask`.
        recalls: templates of questions without one.
    """

    documents: Sequence[Document]
    share: int
    asks: Sequence[str]
    recalls: Sequence[str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Something to be answered.

    Attributes:
        kind: `rag`, `context`, `summary` or `qa`.
        title: of the document that it is about.
        question: what is asked, or how a summary is asked for.
        passages: what it is asked about; none for `qa`.
    """

    kind: str
    title: str
    question: str
    passages: tuple[str, ...]


def plan(corpora: Iterable[Corpus], count: int, excluded: Exclusion, seed: int) -> list[Prompt]:
    """`count` prompts, or as many as there are passages, each about another passage, in an order to be answered in.

    Args:
        corpora: asked about by their shares.
        count: at most.
        excluded: no passage and no question of it is used.
        seed: of everything random.
    """
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    waiting = [(corpus, held, places) for corpus in corpora for held, places in _places(corpus, excluded, rng).items()]
    prompts: list[Prompt] = []
    while waiting and len(prompts) < count:
        # One of each kind in so many rounds is about a document that is held back: so there is some of each to measure on.
        measured = len(prompts) % (len(_KINDS) * HELD_BACK) < len(_KINDS)
        fitting = [(corpus, places) for corpus, held, places in waiting if held == measured]
        drawn = fitting or [(corpus, places) for corpus, _, places in waiting]
        corpus, places = rng.choices(drawn, [corpus.share for corpus, _ in drawn])[0]
        document, number = places.pop()
        prompt = _prompt(corpus, document, number, _KINDS[len(prompts) % len(_KINDS)], excluded, rng)
        if prompt is not None:
            prompts.append(prompt)
        waiting = [left for left in waiting if left[2]]
    return prompts


def _places(corpus: Corpus, excluded: Exclusion, rng: random.Random) -> dict[bool, list[tuple[Document, int]]]:
    """Every passage once, as its document without what is excluded, and its number there; in a random order, by whether the
    document is held back.
    """
    seen: set[str] = set()
    places: dict[bool, list[tuple[Document, int]]] = defaultdict(list)
    for document in corpus.documents:
        kept = tuple(text for text in document.passages if text not in seen and text not in excluded)
        seen.update(kept)
        left = Document(document.title, kept)
        if kept:
            places[is_held_back(document.title)] += [(left, number) for number in range(len(kept))]
    for drawn in places.values():
        rng.shuffle(drawn)
    return places


def _prompt(
    corpus: Corpus, document: Document, number: int, kind: str, excluded: Exclusion, rng: random.Random
) -> Prompt | None:
    """A prompt of that kind about a passage; None where the passage has nothing to ask about, or the question is excluded."""
    passages = document.passages
    if kind == "summary":
        chosen = passages[number : number + rng.randint(1, _SUMMARISED)]
        return Prompt(kind, document.title, rng.choice(_SUMMARISE), chosen)
    question = ask(corpus.recalls if kind == "qa" else corpus.asks, document.title, passages[number], rng)
    if question is None or question in excluded:
        return None
    if kind == "qa":
        return Prompt(kind, document.title, question, ())
    # Beside it stand others of its document, as a search would find them: so no passage of a document that is held back
    # is read in an answer that is trained on.
    others = [text for text in passages if text != passages[number]]
    chosen = (passages[number], *rng.sample(others, min(len(others), rng.randint(0, _PASSAGES - 1))))
    if kind == "rag":
        return Prompt(kind, document.title, question, chosen)
    template = rng.choice(_CONTEXT).replace("{question}", question)
    return Prompt(kind, document.title, template, tuple(rng.sample(chosen, len(chosen))))


def allowed_topics(excluded: Exclusion) -> list[Topic]:
    """The built-in topics of which no question is excluded."""
    return [topic for topic in read_topics() if not any(asked in excluded for asked in topic.questions)]


def requests(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, builder: PromptBuilder
) -> Iterator[Request]:
    """The prompts as the engine takes them; one that leaves no room for its answer is left out."""
    sampling = Sampling(max_tokens=ANSWER)
    for number, prompt in enumerate(prompts):
        name = str(PromptName(prompt.kind, number, prompt.title))
        if prompt.kind == "rag":
            passages = [
                Passage(str(i), text, 0.0, str(i), title=prompt.title) for i, text in enumerate(prompt.passages)
            ]
            try:
                built = builder.build(prompt.question, passages, ANSWER)
            except InputError:
                continue
            yield Request(name, built.token_ids, sampling, built.passage_spans)
        else:
            tokens = chat_tokens(tokenizer, prompt.question.replace("{text}", "\n".join(prompt.passages)))
            yield Request(name, tokens, sampling, ((0, len(tokens)),))


def write_plan(prompts: Iterable[Prompt], path: Path) -> None:
    """As JSON Lines, to be read by people too."""
    path.write_text("".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts), encoding="utf-8")


def read_plan(path: Path) -> list[Prompt]:
    """Back from `write_plan`."""
    lines: list[Mapping[str, object]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Prompt(**{**line, "passages": tuple(line["passages"])}) for line in lines]  # type: ignore[arg-type]
