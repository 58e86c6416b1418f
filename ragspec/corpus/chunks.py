"""Cuts a text into passages: at headings where it can, else at paragraphs, lines, sentences, words, tokens."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence

#: [start, end) character offsets of a text's tokens, in order.
TokenSpans = Sequence[tuple[int, int]]
Span = tuple[int, int]

#: Where a text may be cut, strongest first; each match's end is a cut, so that the pieces tile the text.
_CUTS = (
    re.compile(r"\n(?=#{1,6} )"),  # before a Markdown heading
    re.compile(r"\n[ \t]*\n\s*"),  # between paragraphs
    re.compile(r"\n"),
    re.compile(r"[.!?][\"')\]]*\s+"),  # between sentences
    re.compile(r"\s+"),
)
#: An unknown word counts as a token for each so many characters: WordPiece swallows one of any length as one `[UNK]`,
#: and a page of base64 would be a passage of one token.
_UNKNOWN_CHARS = 8


def split_text(text: str, token_spans: Callable[[str], TokenSpans], size: int, overlap: int = 0) -> list[Span]:
    """Cut a text into passages of at most `size` tokens.

    The text is tiled recursively: a piece that is too long is cut at the strongest kind of place it has, and small
    neighbours are put together again. Then each passage but the first reaches back over the end of the one before.

    Args:
        text: any text.
        token_spans: the tokenizer; a passage's size is counted on the passage by itself.
        size: most tokens of a passage, at least 1.
        overlap: most tokens that a passage repeats of the text before it, below `size`.

    Returns:
        [start, end) offsets of passages in order, without white space at their ends. Every other character of the text
        lies in one at least. Empty for a text of white space.
    """
    tokens = _Tokens(text, token_spans)
    if tokens.count((0, len(text))) <= size:
        tiles, overlap = [(0, len(text))], 0
    else:
        tiles = list(_tile(text, tokens, (0, len(text)), size - overlap, 0))
    passages: list[Span] = []
    for start, end in tiles:
        reach = tokens.back(start, overlap) if passages else start
        if passages and reach < passages[-1][0]:  # never back beyond the passage before
            reach = start
        for candidate in _fitted(text, token_spans, (reach, start, end), size):
            trimmed = _trim(text, candidate)
            if trimmed[0] < trimmed[1]:
                passages.append(trimmed)
    return passages


class _Tokens:
    """Where tokens begin in a text."""

    def __init__(self, text: str, token_spans: Callable[[str], TokenSpans]) -> None:
        self._text = text
        self._starts = _starts(token_spans(text))

    def count(self, span: Span) -> int:
        """Tokens that begin inside a span."""
        return bisect.bisect_left(self._starts, span[1]) - bisect.bisect_left(self._starts, span[0])

    def after(self, start: int, count: int) -> int:
        """Where the token `count` tokens after `start` begins."""
        place = bisect.bisect_left(self._starts, start) + count
        return self._starts[place] if place < len(self._starts) else len(self._text)

    def back(self, end: int, count: int) -> int:
        """The start of the first whole word among the `count` tokens before `end`; `end` where there is none."""
        if count == 0:
            return end
        place = max(0, bisect.bisect_left(self._starts, end) - count)
        for start in self._starts[place:]:
            if start >= end:
                break
            if start == 0 or self._text[start - 1].isspace():
                return start
        return end


def _starts(spans: TokenSpans) -> list[int]:
    return [place for start, end in spans for place in range(start, max(end, start + 1), _UNKNOWN_CHARS)]


def _tile(text: str, tokens: _Tokens, span: Span, size: int, level: int) -> Iterator[Span]:
    """Tiles of `span`, each of at most `size` tokens: pieces of one level put together, long ones cut further."""
    if tokens.count(span) <= size:
        yield span
        return
    if level == len(_CUTS):
        start, end = span
        while start < end:
            stop = min(max(tokens.after(start, size), start + 1), end)
            yield start, stop
            start = stop
        return
    begun: Span | None = None
    for piece in _pieces(text, span, level):
        if begun and tokens.count((begun[0], piece[1])) <= size:
            begun = (begun[0], piece[1])
            continue
        if begun:
            yield begun
            begun = None
        if tokens.count(piece) <= size:
            begun = piece
        else:
            yield from _tile(text, tokens, piece, size, level + 1)
    if begun:
        yield begun


def _pieces(text: str, span: Span, level: int) -> Iterator[Span]:
    start, end = span
    for match in _CUTS[level].finditer(text, start, end):
        if start < match.end() < end:
            yield start, match.end()
            start = match.end()
    yield start, end


def _fitted(
    text: str, token_spans: Callable[[str], TokenSpans], place: tuple[int, int, int], size: int
) -> Iterator[Span]:
    """The passage (reach, start, end), made to hold `size` tokens when it is read by itself.

    A tokenizer may read a piece into more tokens than its part of the whole text had: first the overlap is given up,
    then the piece is halved.
    """
    reach, start, end = place
    if len(_starts(token_spans(text[reach:end]))) <= size:
        yield reach, end
    elif reach < start:
        yield from _fitted(text, token_spans, (start, start, end), size)
    elif end - start > 1:
        middle = (start + end) // 2
        yield from _fitted(text, token_spans, (start, start, middle), size)
        yield from _fitted(text, token_spans, (middle, middle, end), size)
    else:
        yield start, end


def _trim(text: str, span: Span) -> Span:
    start, end = span
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end
