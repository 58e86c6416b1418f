"""The text of an answer while it is written: what is certain of it, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

from ragspec.decoding.stopping import REPLACEMENT, decode

#: Tokens that are decoded again with the new ones: of what lies before them no tokenizer makes a new token's text.
_CONTEXT = 8


@cache
def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens of a tokenizer with byte fallback, each of which is one byte."""
    vocabulary = tokenizer.get_vocab()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    return frozenset(vocabulary[name] for name in names if name in vocabulary)


class TextStream:
    """Makes text of tokens as they come; all that it gives is together what `answer_text` makes of all tokens.

    Held back is what a later token may change: a character of which some bytes are missing; bytes that a tokenizer with byte
    fallback spells one by one, since the whole run of them is no text where one is missing; what may be the beginning of a stop
    string. A token costs the same however long the answer is.

    Args:
        tokenizer: of the target.
        stops: strings that end the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._bytes = _byte_tokens(tokenizer)
        self._tail: list[int] = []
        self._waiting: list[int] = []  # bytes behind the tail
        self._decided = 0  # characters of the tail's text that were taken over
        self._held = ""  # taken over, but perhaps the beginning of a stop string
        self._given = 0

    def take(self, tokens: Sequence[int]) -> str:
        """What has become certain by the next tokens, none of which ended the answer."""
        for token in tokens:
            self._waiting.append(token)
            if token not in self._bytes:
                self._tail += self._waiting
                self._waiting.clear()
        text = decode(self._tokenizer, self._tail)
        decided = len(text.rstrip(REPLACEMENT))
        if decided > self._decided:
            self._held += text[self._decided : decided]
            self._decided = decided
        if decided == len(text) and len(self._tail) > 2 * _CONTEXT:
            del self._tail[:-_CONTEXT]
            self._decided = len(decode(self._tokenizer, self._tail))
        cut = len(self._held) - self._undecided()
        given, self._held = self._held[:cut], self._held[cut:]
        self._given += len(given)
        return given

    def close(self, text: str) -> str:
        """The rest of the answer's whole text, once that is known."""
        rest = text[self._given :]
        self._given = len(text)
        return rest

    def _undecided(self) -> int:
        """How many of the last characters held may be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        return next(
            (
                size
                for size in range(min(longest, len(self._held)), 0, -1)
                if any(len(stop) > size and stop.startswith(self._held[-size:]) for stop in self._stops)
            ),
            0,
        )
