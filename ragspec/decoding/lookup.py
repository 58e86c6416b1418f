"""Drafting by lookup: what followed the longest, most recent occurrence of the present ending.

Prompt lookup (Saxena 2023; n-gram speculation in vLLM) with the match length deciding the draft length, as SAM-Decoding
(arXiv 2411.10666) found: a long match has earned a long copy. The prompt holds the retrieved passages, so this is where
retrieval and speculation meet; a draft token's source says whether it was copied from a passage, from the rest of the prompt
or from the answer's own text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft
from ragspec.decoding.request import Request

#: Longest ending that is indexed. A longer common ending does not change what is drafted in practice, and the index takes
#: one entry a token and length.
LONGEST_MATCH = 6
#: Draft tokens per matched token: what a copy has earned. On the rag rows of Spec-Bench, 2 keeps nearly the acceptance
#: length of a fixed draft while drafting less (benchmarks/speculation.py).
DRAFT_PER_MATCH = 2


class LookupDrafter:
    """Copies from the request's own prompt and answer."""

    name = "lookup"

    def __init__(self, longest_match: int = LONGEST_MATCH) -> None:
        self._longest = longest_match
        self._texts: dict[str, _IndexedText] = {}

    def begin(self, request: Request) -> None:
        """Index the prompt."""
        self._texts[request.id] = _IndexedText(request, self._longest)

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Index what was emitted."""
        del hidden
        self._texts[request_id].extend(tokens)

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        """Copy what followed the longest, most recent occurrence of each text's ending."""
        return {request_id: self._texts[request_id].draft(limit) for request_id, limit in limits.items() if limit > 0}

    def end(self, request_id: str) -> None:
        """Drop the text and its index."""
        self._texts.pop(request_id, None)


class _IndexedText:
    """A growing text with, for every ending of 1..longest tokens, the place that last followed it.

    Extending and looking up take time in the longest match, not in the text.
    """

    def __init__(self, request: Request, longest: int) -> None:
        self._tokens: list[int] = []
        self._sources: list[Source] = []
        self._longest = longest
        self._next: dict[tuple[int, ...], int] = {}
        inside = [False] * len(request.prompt)
        for start, end in request.passage_spans:
            inside[start:end] = [True] * (end - start)
        self.extend(request.prompt, [Source.PASSAGE if copied else Source.PROMPT for copied in inside])

    def extend(self, tokens: Sequence[int], sources: Sequence[Source] | None = None) -> None:
        for token in tokens:
            place = len(self._tokens)
            for length in range(1, min(self._longest, place) + 1):
                self._next[tuple(self._tokens[place - length :])] = place
            self._tokens.append(token)
        self._sources.extend(sources or [Source.ANSWER] * len(tokens))

    def draft(self, limit: int) -> Draft:
        size = len(self._tokens)
        for length in range(min(self._longest, size), 0, -1):
            place = self._next.get(tuple(self._tokens[size - length :]))
            if place is not None:
                end = min(place + min(limit, DRAFT_PER_MATCH * length), size)
                return Draft(tuple(self._tokens[place:end]), tuple(self._sources[place:end]))
        return Draft()
