"""The lookup drafter copies from the longest, most recent match."""

from __future__ import annotations

import random

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft
from ragspec.decoding.lookup import DRAFT_PER_MATCH, LONGEST_MATCH, LookupDrafter
from ragspec.decoding.request import Request


def propose(prompt: list[int], emitted: list[int], limit: int = 10, spans: tuple[tuple[int, int], ...] = ()) -> Draft:
    drafter = LookupDrafter()
    drafter.begin(Request("r", tuple(prompt), passage_spans=spans))
    drafter.observe("r", emitted, None)
    return dict(drafter.propose({"r": limit}))["r"]


def test_the_longer_match_wins_over_the_more_recent() -> None:
    draft = propose([1, 2, 3, 50, 51, 52, 53, 3, 60, 61], [1, 2, 3])

    assert draft.tokens[:3] == (50, 51, 52)


def test_of_equal_matches_the_most_recent_wins() -> None:
    draft = propose([7, 8, 100, 9, 7, 8, 200, 9], [7, 8])

    assert draft.tokens[0] == 200


def test_a_long_match_earns_a_long_draft() -> None:
    text = list(range(100, 140))
    short = propose(text, [105])
    long = propose(text, [101, 102, 103, 104, 105])

    assert short.tokens == tuple(range(106, 106 + DRAFT_PER_MATCH))
    assert long.tokens == tuple(range(106, 116))


def test_sources_tell_passage_prompt_and_answer_apart() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    from_passage = propose(prompt, [1, 2], spans=((0, 4),))
    from_answer = propose(prompt, [90, 91, 92, 90, 91])

    assert from_passage.tokens[:3] == (3, 4, 5)
    assert from_passage.sources[:3] == (Source.PASSAGE, Source.PASSAGE, Source.PROMPT)
    assert from_answer.tokens[0] == 92
    assert from_answer.sources[0] is Source.ANSWER


def test_nothing_seen_before_gives_no_draft() -> None:
    assert propose([1, 2, 3], [4]) == Draft()


def test_it_finds_what_a_plain_search_finds() -> None:
    """Against the definition, on random texts over a small alphabet."""
    rng = random.Random(0)
    for _ in range(500):
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 30))]
        emitted = [rng.randrange(4) for _ in range(rng.randint(1, 10))]
        text = prompt + emitted

        def expected(text: list[int] = text) -> tuple[int, ...]:
            for length in range(min(LONGEST_MATCH, len(text)), 0, -1):
                for start in range(len(text) - length - 1, -1, -1):
                    if text[start : start + length] == text[-length:]:
                        place = start + length
                        return tuple(text[place : place + min(10, DRAFT_PER_MATCH * length)])
            return ()

        assert propose(prompt, emitted).tokens == expected()


def test_a_finished_request_is_forgotten() -> None:
    drafter = LookupDrafter()
    drafter.begin(Request("r", (1, 2, 3)))
    drafter.end("r")
    drafter.end("r")

    assert not drafter._texts
