"""What a lookup's draft and a head's say together."""

from __future__ import annotations

import itertools

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft, Evidence
from ragspec.decoding.hybrid import weigh_together


def draft(tokens: tuple[int, ...], prior: float, source: Source) -> Draft:
    evidence = tuple(Evidence((source.name, place), prior) for place in range(len(tokens)))
    return Draft(tokens, (source,) * len(tokens), evidence)


def priors(draft: Draft) -> list[float]:
    return [evidence.prior for evidence in draft.evidence]


def test_tokens_that_both_propose_are_likelier_than_either_says() -> None:
    copied, drafted = weigh_together(draft((1, 2, 3), 0.5, Source.PASSAGE), draft((1, 2, 9), 0.5, Source.HEAD))

    assert copied.evidence[:2] == drafted.evidence[:2]
    assert all(prior > 0.7 for prior in priors(copied)[:2])
    assert copied.tokens == (1, 2, 3)
    assert drafted.sources == (Source.HEAD,) * 3


def test_where_they_differ_at_most_one_is_right() -> None:
    for p, q in itertools.product((0.1, 0.25, 0.5, 0.7, 0.85, 0.95), repeat=2):
        copied, drafted = weigh_together(draft((1,), p, Source.PASSAGE), draft((2,), q, Source.HEAD))
        both = priors(copied)[0] + priors(drafted)[0]
        assert both <= 1.0
        assert (priors(copied)[0] > priors(drafted)[0]) == (p > q) or p == q
        assert copied.evidence[0] != drafted.evidence[0], "they are counted apart"


def test_behind_the_first_difference_each_stands_for_itself() -> None:
    one, other = draft((1, 2, 3, 4), 0.5, Source.PASSAGE), draft((1, 7, 3), 0.6, Source.HEAD)
    copied, drafted = weigh_together(one, other)

    assert copied.evidence[2:] == one.evidence[2:]
    assert drafted.evidence[2:] == other.evidence[2:]


def test_a_draft_that_goes_on_alone_keeps_what_it_said() -> None:
    one, other = draft((1, 2, 3, 4), 0.5, Source.PASSAGE), draft((1, 2), 0.6, Source.HEAD)
    copied, drafted = weigh_together(one, other)

    assert copied.evidence[2:] == one.evidence[2:]
    assert len(drafted.evidence) == 2


def test_drafts_that_say_nothing_are_left_as_they_are() -> None:
    silent = Draft((1, 2), (Source.HEAD,) * 2)
    other = draft((1, 2), 0.6, Source.PASSAGE)

    assert weigh_together(silent, other) == (silent, other)
