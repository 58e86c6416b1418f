"""The index finds what a plain search finds, and forgets."""

from __future__ import annotations

import random

from ragspec.decoding.matching import CANDIDATES, LONGEST_MATCH, Match, MatchIndex


def index_of(tokens: list[int]) -> MatchIndex:
    index = MatchIndex()
    index.extend(tokens)
    return index


def search(text: list[int], ending: list[int], oldest: int = 0, *, separators: bool = False) -> Match | None:
    """The definition: every place, its agreement with the ending, the longest, newest first; separators follow nothing."""
    agreements = {}
    for place in range(len(text) - 1, oldest - 1, -1):
        length = 0
        while length < min(place - oldest, len(ending), LONGEST_MATCH):
            if text[place - 1 - length] != ending[-1 - length]:
                break
            length += 1
        if length and not (separators and text[place] < 0):
            agreements[place] = length
    if not agreements:
        return None
    longest = max(agreements.values())
    return Match(longest, tuple(place for place, length in agreements.items() if length == longest))


def test_it_finds_what_a_plain_search_finds() -> None:
    """On random texts with few enough occurrences that a search compares them all, extended in pieces of any length."""
    rng = random.Random(0)
    found = 0
    for _ in range(400):
        text = [rng.randrange(12) for _ in range(rng.randint(2, CANDIDATES * 3))]
        index = MatchIndex()
        rest = list(text)
        while rest:
            cut = rng.randint(1, len(rest))
            index.extend(rest[:cut])
            rest = rest[cut:]
        expected = search(text, text)
        if expected is None or len(expected.places) < CANDIDATES // 2:
            match = index.find(index.tokens)
            assert match == expected
            found += match is not None

    assert found > 100


def test_separators_and_what_was_forgotten_are_never_matched_nor_copied() -> None:
    """Answers behind separators, forgotten from the front: as a plain search over what is left."""
    rng = random.Random(1)
    found = 0
    for _ in range(300):
        index, text, starts = MatchIndex(), [], []
        for _ in range(rng.randint(1, 6)):
            starts.append(len(text))
            answer = [-1, *(rng.randrange(15) for _ in range(rng.randint(1, 8)))]
            text += answer
            index.extend(answer)
        oldest = rng.choice(starts)
        index.forget(oldest)
        ending = [-1, *(rng.randrange(15) for _ in range(rng.randint(1, 4)))]
        match = index.find(ending)
        expected = search(text, ending, oldest, separators=True)
        if expected is None or len(expected.places) < CANDIDATES // 2:
            assert match == expected
            found += match is not None

    assert found > 100
    assert index_of([4, 0]).find([-1]) is None


def test_an_ending_of_another_text_is_found() -> None:
    assert index_of([1, 2, 3, 4, 5]).find([9, 2, 3]) == Match(2, (3,))
    assert index_of([1, 2, 3, 4, 5]).find([9]) is None


def test_a_match_is_measured_beyond_the_longest_chained_gram() -> None:
    text = list(range(100, 140))

    assert index_of([*text, 7, *text[:10]]).find([7, *text[:10]]) == Match(10, (10,))
    assert index_of([*text, 7, *text[:30]]).find(text[:30]) == Match(LONGEST_MATCH, (30,))


def test_the_continuation_that_most_occurrences_agree_on_is_elected() -> None:
    """And of those that agree, the newest place; of equally many, the newest."""
    index = index_of([1, 50, 9, 1, 50, 8, 1, 60, 7])
    match = index.find([1])

    assert match == Match(1, (7, 4, 1))
    assert index.elect(match) == (4, 2)
    even = index_of([1, 50, 9, 1, 60, 7])
    assert even.elect(Match(1, (4, 1))) == (4, 1)


def test_what_is_forgotten_is_found_no_more_and_takes_no_memory() -> None:
    """Places keep their numbers, whatever was deleted before them."""
    rng = random.Random(1)
    index = MatchIndex()
    text: list[int] = []
    kept = 60
    for _ in range(200):
        piece = [rng.randrange(30) for _ in range(rng.randint(1, 20))]
        text += piece
        index.extend(piece)
        oldest = max(0, len(text) - kept)
        index.forget(oldest)
        match = index.find(text[-8:])
        if match is not None:
            assert min(match.places) >= oldest
            for place in match.places:
                assert index.read(place, 5) == text[place : place + 5]
                assert text[place - match.length : place] == text[len(text) - match.length :]

    assert len(index) == kept
    assert index.end == len(text)
    assert len(index.tokens) <= 2 * kept + 20
    assert all(len(chain.newest) <= 2 * kept + 20 for chain in index._chains.values())
