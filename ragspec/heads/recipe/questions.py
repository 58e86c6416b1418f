"""Questions about a passage, out of templates: the default target is too small to ask any."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from string import Formatter

#: Two capitalised words or more, perhaps with `of` or `the` between them.
_PHRASE = re.compile(r"\b[A-Z][\w'-]+(?:\s(?:(?:of|the|and|for|de)\s){0,2}[A-Z][\w'-]+)+")
#: A capitalised word that begins no sentence.
_WORD = re.compile(r"(?<=[a-z,;] )[A-Z][\w'-]{2,}")
#: What a line begins with, before a colon.
_LABEL = re.compile(r"^([A-Z][\w ,()/&-]{2,40}): ", re.MULTILINE)
#: Words that are capitalised for grammar or politeness and name nothing.
_NO_NAMES = frozenset({"The", "This", "That", "These", "There", "And", "But", "For", "You", "Your", "Its", "They"})


def names(passage: str) -> list[str]:
    """The names in a passage, each once: phrases, then single words outside of these."""
    phrases = [" ".join(match.group().split()) for match in _PHRASE.finditer(passage)]
    words = [match.group() for match in _WORD.finditer(_PHRASE.sub("", passage))]
    return [name for name in dict.fromkeys(phrases + words) if name not in _NO_NAMES]


def labels(passage: str) -> list[str]:
    """What the passage's lines are labelled with, as in `Climate: mild`, each once, as it stands in a sentence."""
    found = (match.group(1) for match in _LABEL.finditer(passage))
    return list(dict.fromkeys(label[0].lower() + label[1:] if label[1:].islower() else label for label in found))


def ask(templates: Sequence[str], title: str, passage: str, rng: random.Random) -> str | None:
    """A question by one of those templates for which the passage has what they need; None where it has that for none.

    Args:
        templates: with `{title}`, `{name}` and `{other}`, `{label}` and `{other_label}`.
        title: of the passage's document.
        passage: what is asked about.
        rng: chooses.
    """
    filled = {"title": title}
    for keys, found in ((("name", "other"), names(passage)), (("label", "other_label"), labels(passage))):
        filled |= dict(zip(keys, rng.sample(found, min(len(keys), len(found))), strict=False))
    fitting = [
        template
        for template in templates
        if all(field in filled for _, field, _, _ in Formatter().parse(template) if field is not None)
    ]
    return rng.choice(fitting).format(**filled) if fitting else None
