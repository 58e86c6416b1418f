"""Scores of answers against gold: exact match and F1 as SQuAD v1.1 counts them, containment, recall of the gold passage.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), and its evaluate-v1.1.py.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Gold:
    """What a question's answer ought to be.

    Attributes:
        answers: texts of which any is right; empty where the file gives none.
        passage_id: the passage that holds the answer, or None where the file does not say.
    """

    answers: tuple[str, ...] = ()
    passage_id: str | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over the questions that were answered or failed; a failed answer counts as wrong.

    Attributes:
        scored: questions with gold answers that were answered or failed.
        exact_match, contains, f1: fractions, 0 to 1; `contains` of the answers that have a gold answer in them.
        ranked: questions with a gold passage that were answered or failed.
        recall: fraction of those with the gold passage among the retrieved ones.
        k: the most passages that any of them was given.
    """

    scored: int
    exact_match: float
    contains: float
    f1: float
    ranked: int
    recall: float
    k: int


def normalize(text: str) -> str:
    """Lower case, without punctuation, English articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether the prediction equals any answer, both normalised."""
    return normalize(prediction) in {normalize(answer) for answer in answers}


def contains(prediction: str, answers: Iterable[str]) -> bool:
    """Whether any answer stands in the prediction, whole words in a row, both normalised.

    What a model that answers in sentences can be held to: "It is Paris." is no exact match of "Paris".
    """
    return any(f" {normalize(answer)} " in f" {normalize(prediction)} " for answer in answers)


def f1(prediction: str, answers: Iterable[str]) -> float:
    """The best F1 over the answers, of words in common counted with repetition; 0.0 without an answer."""
    return max((_word_f1(normalize(prediction).split(), normalize(answer).split()) for answer in answers), default=0.0)


def found(passage_id: str, passages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the gold passage, or a piece of the document of that name, is among the retrieved ones."""
    return any(passage_id in {passage["id"], passage["document"]} for passage in passages)


def score(judged: Iterable[tuple[Gold, str | None, Sequence[Mapping[str, Any]]]]) -> Scores:
    """Sum up (gold, answer or None where it failed, retrieved passages)."""
    scored = ranked = k = 0
    matches = within = words = hits = 0.0
    for gold, answer, passages in judged:
        if gold.answers:
            scored += 1
            matches += answer is not None and exact_match(answer, gold.answers)
            within += answer is not None and contains(answer, gold.answers)
            words += f1(answer, gold.answers) if answer is not None else 0.0
        if gold.passage_id is not None:
            ranked += 1
            hits += found(gold.passage_id, passages)
            k = max(k, len(passages))
    answered = max(scored, 1)
    return Scores(scored, matches / answered, within / answered, words / answered, ranked, hits / max(ranked, 1), k)


def _word_f1(prediction: list[str], answer: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(answer)).values())
    if not common:
        return 0.0
    precision, recall = common / len(prediction), common / len(answer)
    return 2 * precision * recall / (precision + recall)
