"""The hidden states behind text that was written before: what `recording` keeps as text is written, computed afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.target import Target
from ragspec.heads.recording import Recording

#: Tokens of a forward pass at most: a prompt in one pass would need room for the scores of all its tokens at once.
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Written:
    """An answer that the target wrote before.

    Attributes:
        request_id: as in `Recording`.
        prompt: what it answers, at least one token.
        tokens: the answer, at least one token.
        text: the answer's.
    """

    request_id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str


@torch.inference_mode()
def replay(target: Target, answers: Iterable[Written], window: int) -> Iterator[Recording]:
    """Read each answer behind its prompt and yield the states that its tokens were chosen by.

    What a prompt has in common with the one before it is not computed again: give those that begin alike one after another.

    Args:
        target: who wrote them.
        answers: taken one at a time; one that does not fit is left out.
        window: tokens of prompt and answer.
    """
    cache = target.make_cache(1, window)
    held: tuple[int, ...] = ()
    for answer in answers:
        # The last token was chosen, and never read.
        text = (*answer.prompt, *answer.tokens[:-1])
        if len(text) > window:
            continue
        first = len(answer.prompt) - 1  # the row that chose the answer's first token
        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, text[:first], strict=False)))
        states = []
        for start in range(known, len(text), CHUNK):
            fed = text[start : start + CHUNK]
            rows = list(range(max(0, first - start), len(fed)))
            output = target.forward(cache, [Segment(0, start, len(fed))], list(fed), rows, hidden=True)
            if output.hidden is not None and rows:
                states.append(output.hidden.to(torch.bfloat16, copy=True).cpu())
        held = text
        yield Recording(answer.request_id, answer.prompt, answer.text, answer.tokens, torch.cat(states))
