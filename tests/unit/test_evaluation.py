"""The scores, against values worked out by hand."""

from __future__ import annotations

import pytest

from ragspec.evaluation import Gold, Scores, contains, exact_match, f1, found, normalize, score


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Denver Broncos!", "denver broncos"),
        ("an A-Team, the best", "ateam best"),
        ("Another theme", "another theme"),
        ("308", "308"),
        ("...", ""),
    ],
)
def test_normalising_drops_case_punctuation_articles_and_space(text: str, normal: str) -> None:
    assert normalize(text) == normal


def test_an_exact_match_needs_any_one_answer() -> None:
    assert exact_match("the Broncos.", ["Panthers", "Broncos"])
    assert not exact_match("the Denver Broncos", ["Broncos"])
    assert not exact_match("Broncos", [])


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("It is the Denver Broncos.", ["Panthers", "Denver Broncos"], True),
        ("Broncos", ["the Broncos!"], True),
        ("Denver and its Broncos", ["Denver Broncos"], False),
        ("thistles", ["this"], False),
        ("In 1995", ["199"], False),
        ("Broncos", [], False),
        ("anything", ["the"], False),
    ],
)
def test_containing_takes_whole_words_in_a_row(prediction: str, answers: list[str], expected: bool) -> None:
    assert contains(prediction, answers) is expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        # 2 words in common of 3 predicted and 4 right: precision 2/3, recall 1/2, F1 4/7.
        ("carried the red flag", ["a red flag over castle"], 4 / 7),
        ("Broncos", ["Panthers", "the Broncos"], 1.0),
        ("Broncos", ["Panthers"], 0.0),
        # "no" counts once in the answer, so once in common: precision 1/3, recall 1, F1 1/2.
        ("no no no", ["no"], 0.5),
        ("", ["no"], 0.0),
        ("no", [], 0.0),
    ],
)
def test_f1_is_the_best_overlap_of_words(prediction: str, answers: list[str], expected: float) -> None:
    assert f1(prediction, answers) == pytest.approx(expected)


def test_a_passage_is_found_by_its_own_name_or_its_documents() -> None:
    passages = [{"id": "a#0", "document": "a"}, {"id": "b", "document": "b.md"}]

    assert [found(gold, passages) for gold in ("a", "a#0", "b", "c")] == [True, True, True, False]


def test_scores_are_means_in_which_a_failed_answer_is_wrong() -> None:
    passages = [{"id": "p", "document": "p"}, {"id": "r", "document": "r"}]

    scores = score(
        [
            (Gold(("Paris",), "p"), "paris", passages),
            (Gold(("Lyon",)), "in Lyon", passages),
            (Gold(("red flag",), "q"), "red", passages),
            (Gold(("Rome",)), None, []),
            (Gold(passage_id="r"), None, []),
        ]
    )

    assert scores == Scores(
        scored=4,
        exact_match=pytest.approx(1 / 4),
        contains=pytest.approx(2 / 4),
        f1=pytest.approx((1 + 2 / 3 + 2 / 3) / 4),
        ranked=3,
        recall=pytest.approx(1 / 3),
        k=2,
    )
    assert score([]) == Scores(0, 0.0, 0.0, 0.0, 0, 0.0, 0)
