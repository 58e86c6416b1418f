"""What a lookup's match says about the draft copied from it, as kinds of evidence with the priors that we measured.

Measured on answers of the default model to the 40 rag, qa and summarization prompts of Spec-Bench and to 160
questions of XQuAD with three passages each: every step's draft was compared with what the target wrote
(docs/architecture.md). A prior only says where the running counts begin (`ragspec.decoding.acceptance_rates`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from ragspec.decoding.draft import Evidence
from ragspec.decoding.matching import LONGEST_MATCH, Match

Text = Literal["own", "job"]

#: Least match lengths of the kinds. A token further into the draft counts as matched by the draft tokens before it,
#: too: it is only reached when those stand.
_LENGTHS = (1, 2, 3, 4, 6, 10, 16)
#: Of the first draft token: by how many of the match's occurrences agree on it (rows, see `_agreement`) and by match
#: length.
_FIRST: dict[Text, dict[str, tuple[float, ...]]] = {
    "own": {
        "one": (0.37, 0.50, 0.59, 0.52, 0.57, 0.79, 0.93),
        "all": (0.75, 0.76, 0.73, 0.78, 0.78, 0.96, 0.98),
        "most": (0.47, 0.44, 0.55, 0.55, 0.60, 0.75, 0.90),
        "some": (0.19, 0.19, 0.17, 0.18, 0.25, 0.50, 0.70),
        "few": (0.13, 0.08, 0.10, 0.10, 0.15, 0.25, 0.50),
    },
    "job": {
        "one": (0.22, 0.30, 0.33, 0.43, 0.55, 0.72, 0.92),
        "all": (0.42, 0.52, 0.45, 0.55, 0.70, 0.80, 0.92),
        "most": (0.40, 0.30, 0.33, 0.33, 0.45, 0.60, 0.80),
        "some": (0.17, 0.15, 0.20, 0.20, 0.30, 0.50, 0.60),
        "few": (0.08, 0.08, 0.10, 0.10, 0.20, 0.30, 0.40),
    },
}
#: Of the tokens behind it, by match length and the draft tokens between; the first column is never reached.
_BEHIND: dict[Text, tuple[float, ...]] = {
    "own": (0.55, 0.55, 0.67, 0.74, 0.83, 0.85, 0.93),
    "job": (0.19, 0.19, 0.43, 0.47, 0.64, 0.68, 0.92),
}


def evidence(text: Text, match: Match, votes: int, count: int) -> tuple[Evidence, ...]:
    """The evidence of a draft of `count` tokens.

    Args:
        text: where it was copied from: the request's own, or its job's answers.
        match: what it was copied behind.
        votes: of the match's occurrences, those that go on with the draft's first token.
        count: of the draft's tokens.
    """
    if not count:
        return ()
    first = _FIRST_KINDS[text, _agreement(votes, len(match.places)), match.length]
    behind = _BEHIND_KINDS[text]
    return first, *(behind[min(match.length + ahead, LONGEST_MATCH)] for ahead in range(1, count))


def _agreement(votes: int, occurrences: int) -> str:
    if occurrences == 1:
        return "one"
    if votes == occurrences:
        return "all"
    if 2 * votes > occurrences:
        return "most"
    return "some" if 4 * votes > occurrences else "few"


def _column(length: int) -> int:
    return bisect_right(_LENGTHS, length) - 1


_FIRST_KINDS = {
    (text, agreement, length): Evidence((text, agreement, _LENGTHS[_column(length)]), priors[_column(length)])
    for text, rows in _FIRST.items()
    for agreement, priors in rows.items()
    for length in range(1, LONGEST_MATCH + 1)
}
#: By text and tokens matched.
_BEHIND_KINDS = {
    text: tuple(
        Evidence((text, "behind", _LENGTHS[column]), priors[column])
        for column in (max(0, _column(length)) for length in range(LONGEST_MATCH + 1))
    )
    for text, priors in _BEHIND.items()
}
