"""Finding earlier occurrences of a text's ending: hash chains, as LZ77 compressors keep them (RFC 1951, section 4).

Every place of a text is chained to the last earlier place behind the same n-gram. Adding a token costs one link for
each length of n-gram; a search follows a chain from its newest link and compares at most `CANDIDATES` places. Neither
grows with the text (benchmarks/lookup.py). A suffix automaton (SAM-Decoding, arXiv 2411.10666) finds the longest
match in the same time, but it cannot forget its oldest tokens, and it knows one place of a match where we want
several: they vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

#: Lengths of the n-grams that are chained, in the order in which they are tried: a common word has many more earlier
#: places than a search compares, four tokens in a row rarely do.
ORDERS = (4, 2, 1)
#: Places that a search compares, newest first.
CANDIDATES = 16
#: A match is measured up to here; one that is longer is as sure as it gets.
LONGEST_MATCH = 16

#: Bits of a token in the key of an n-gram. Larger tokens make keys that can collide: a comparison more, nothing else.
_TOKEN_BITS = 20


@dataclass(frozen=True, slots=True)
class Match:
    """Where an ending occurred before.

    Attributes:
        length: tokens that agree, at most `LONGEST_MATCH`.
        places: where that which followed each such occurrence begins, newest first.
    """

    length: int
    places: tuple[int, ...]


@dataclass(slots=True)
class _Chain:
    """Places behind the same n-gram: the newest by n-gram, and for each place of the text the one before it, or -1."""

    newest: dict[int, int] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)

    def extend(self, keys: Iterable[int], place: int) -> None:
        newest, before = self.newest, self.before
        for here, key in enumerate(keys, place):
            before.append(newest.get(key, -1))
            newest[key] = here

    def forget(self, count: int, oldest: int) -> None:
        del self.before[:count]
        self.newest = {key: place for key, place in self.newest.items() if place >= oldest}


class MatchIndex:
    """A growing text that can forget its oldest tokens.

    A negative token separates what stands before it from what stands behind: it is matched, but follows nothing.

    Places count from the first token ever added and stay as they are when tokens are forgotten.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._base = 0  # place of _tokens[0]
        self._oldest = 0  # place of the oldest token that counts; those before it wait to be deleted
        self._chains = {order: _Chain() for order in ORDERS}

    def __len__(self) -> int:
        """Tokens that count."""
        return self.end - self._oldest

    @property
    def end(self) -> int:
        """The place that the next token will take."""
        return self._base + len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """The text, oldest token first; with what was forgotten but not deleted yet."""
        return self._tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        longest = ORDERS[0]
        # What stands before the text is no token, so that a place near its beginning needs no special case.
        padded = [*([-1] * longest + self._tokens[-longest:])[-longest:], *tokens]
        pairs = [a << _TOKEN_BITS | b for a, b in pairwise(padded)]
        quads = (a << 2 * _TOKEN_BITS | b for a, b in zip(pairs, pairs[2:], strict=False))
        for order, keys in ((4, quads), (2, pairs[2:]), (1, padded[3:])):
            self._chains[order].extend(islice(keys, len(tokens)), self.end)
        self._tokens.extend(tokens)

    def forget(self, place: int) -> None:
        """Drop the tokens before `place`."""
        self._oldest = place
        dead = place - self._base
        if dead > len(self._tokens) // 2:  # only then: each token is moved once at most, on average
            del self._tokens[:dead]
            for chain in self._chains.values():
                chain.forget(dead, place)
            self._base = place

    def elect(self, match: Match) -> tuple[int, int]:
        """The newest place of the continuation that most occurrences of a match begin with, and how many do."""
        if len(match.places) == 1:
            return match.places[0], 1
        following = [self._tokens[place - self._base] for place in match.places]
        votes = [following.count(token) for token in following]
        most = max(votes)
        return match.places[votes.index(most)], most

    def read(self, place: int, count: int) -> list[int]:
        """Up to `count` tokens from `place` on."""
        start = place - self._base
        return self._tokens[start : start + count]

    def find(self, ending: Sequence[int]) -> Match | None:
        """The longest occurrences of `ending` that something follows, among the newest that share its last tokens."""
        for order in ORDERS[:-1]:
            if len(ending) >= order and (match := self._longest(self._chains[order], _key(ending, order), ending)):
                return match
        return self._single(ending[-1]) if ending else None

    def _single(self, token: int) -> Match | None:
        """The newest occurrences of a token, none of which is of a longer ending: nothing is left to compare.

        Behind the beginning of the text, or of what is left of it, stands no token.
        """
        chain, places = self._chains[1], []
        place = chain.newest.get(token, -1)
        for _ in range(CANDIDATES):
            if place < self._oldest:
                break
            if place > self._base and self._tokens[place - self._base] >= 0:
                places.append(place)
            place = chain.before[place - self._base]
        return Match(1, tuple(places)) if places else None

    def _longest(self, chain: _Chain, key: int, ending: Sequence[int]) -> Match | None:
        longest, places = 0, []
        place = chain.newest.get(key, -1)
        for _ in range(CANDIDATES):
            if place < self._oldest:
                break
            length = self._agreement(place - self._base, ending) if self._tokens[place - self._base] >= 0 else 0
            if length > longest:
                longest, places = length, [place]
            elif length and length == longest:
                places.append(place)
            place = chain.before[place - self._base]
        return Match(longest, tuple(places)) if places else None

    def _agreement(self, start: int, ending: Sequence[int]) -> int:
        """Tokens before `start` that are those of `ending`, counted from its end."""
        text, size = self._tokens, len(ending)
        most = min(start, size, LONGEST_MATCH)
        length = 0
        while length < most and text[start - 1 - length] == ending[size - 1 - length]:
            length += 1
        return length


def _key(ending: Sequence[int], order: int) -> int:
    key = 0
    for token in ending[-order:]:
        key = key << _TOKEN_BITS | token
    return key
