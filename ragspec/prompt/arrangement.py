"""In which order a prompt's passages stand.

Prompts share their prefill as far as they begin alike, so what stands first should be what other prompts begin with. The rule
may look at a question's own passages only: then its prompt, and so its answer, depends on nothing else of its job, neither on
timing nor on which rows were answered before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ragspec.corpus.passage import Passage

PassageOrder = Literal["score", "shared"]


def arrange(passages: Sequence[Passage], order: PassageOrder) -> list[Passage]:
    """The passages as the template gets them.

    Args:
        passages: best first.
        order: `score` leaves them; `shared` puts the longest last, where the default template shows it first: questions
            with the same two passages then begin alike whichever is better, and share the longer one where they have only
            that in common. Ties go by document and id.
    """
    if order == "score":
        return list(passages)
    return sorted(passages, key=lambda passage: (len(passage.text), passage.document, passage.id))
