"""Two drafts for the same place, from sources that know nothing of each other: what their agreement says.

Lookup copies what followed the same words before; a head knows what the target is about to say. Where both propose the same
token it stands far more often than either alone would tell, and where they differ at most one of them is right. So the evidence
of a token is not its own draft's alone: it is what the two say together.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Literal

from ragspec.decoding.draft import Draft, Evidence

#: Where the probability that a source gives a token passes from one kind of evidence to the next.
_EDGES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
_Verdict = Literal["agreed", "copy disputed", "head disputed"]


def weigh_together(copied: Draft, drafted: Draft) -> tuple[Draft, Draft]:
    """A lookup's draft and a head's, each with evidence that knows of the other, as far as the two go side by side.

    Behind the first token in which they differ each stands for itself again: its tokens only count where its own is right.
    """
    if not (copied.evidence and drafted.evidence):
        return copied, drafted
    common = 0
    while common < min(len(copied.tokens), len(drafted.tokens)) and copied.tokens[common] == drafted.tokens[common]:
        common += 1
    pairs = list(zip(copied.evidence, drafted.evidence, strict=False))
    agreed = [_together("agreed", one, other) for one, other in pairs[:common]]
    copy, head = list(copied.evidence), list(drafted.evidence)
    copy[:common] = head[:common] = agreed
    if common < len(pairs):
        copy[common], head[common] = (
            _together(verdict, *pairs[common]) for verdict in ("copy disputed", "head disputed")
        )
    return _with(copied, copy), _with(drafted, head)


def _with(draft: Draft, evidence: list[Evidence]) -> Draft:
    return Draft(draft.tokens, draft.sources, tuple(evidence))


def _together(verdict: _Verdict, copied: Evidence, drafted: Evidence) -> Evidence:
    return _evidence(verdict, bisect_right(_EDGES, copied.prior), bisect_right(_EDGES, drafted.prior))


@lru_cache
def _evidence(verdict: _Verdict, copied: int, drafted: int) -> Evidence:
    p, q = _middle(copied), _middle(drafted)
    neither = (1 - p) * (1 - q)
    prior = {
        "agreed": 1 - neither,
        "copy disputed": p * (1 - q) / (1 - p * q),
        "head disputed": q * (1 - p) / (1 - p * q),
    }[verdict]
    return Evidence((verdict, copied, drafted), prior)


def _middle(bucket: int) -> float:
    edges = (0.0, *_EDGES, 1.0)
    return (edges[bucket] + edges[bucket + 1]) / 2
