"""What was accepted says what will be."""

from __future__ import annotations

import pytest

from ragspec.decoding.acceptance import Source
from ragspec.decoding.acceptance_rates import KIND_HALF_LIFE, AcceptanceRates
from ragspec.decoding.draft import Draft, Evidence

GOOD, BAD = Evidence("good", 0.5), Evidence("bad", 0.5)


def draft(*evidence: Evidence) -> Draft:
    return Draft((1,) * len(evidence), (Source.PROMPT,) * len(evidence), evidence)


def taught(times: int = 300) -> AcceptanceRates:
    """Good evidence was always right, bad evidence never; learnt on one sequence."""
    rates = AcceptanceRates()
    for _ in range(times):
        rates.turn(["teacher"])
        rates.record("teacher", draft(GOOD, GOOD, BAD), 2)
    return rates


def test_a_prior_holds_until_something_was_counted() -> None:
    rates = AcceptanceRates()
    rates.turn(["r"])

    assert rates.survival("r", draft(Evidence("x", 0.8), Evidence("y", 0.5))) == pytest.approx([0.8, 0.4])


def test_evidence_that_was_right_before_is_trusted_and_evidence_that_was_wrong_is_not() -> None:
    rates = taught()
    rates.turn(["r"])

    good, bad = rates.survival("r", draft(GOOD))[0], rates.survival("r", draft(BAD))[0]

    assert good > 0.9
    assert bad < 0.1


def test_what_stands_behind_the_first_refused_token_was_not_tested() -> None:
    rates = AcceptanceRates()
    for _ in range(300):
        rates.turn(["r"])
        rates.record("r", draft(BAD, GOOD), 0)
    rates.turn(["other"])

    assert rates.survival("other", draft(GOOD)) == pytest.approx([0.5])
    assert rates.survival("other", draft(BAD))[0] < 0.1


def test_a_sequence_that_fares_worse_than_others_is_trusted_less() -> None:
    rates = taught()
    rates.turn(["lucky", "unlucky"])
    for _ in range(5):
        rates.record("unlucky", draft(Evidence("other", 0.9)), 0)

    assert rates.survival("unlucky", draft(GOOD))[0] < rates.survival("lucky", draft(GOOD))[0]


def test_what_is_not_tested_any_more_returns_to_its_prior() -> None:
    """So it is tried again: neither a sequence nor a kind of evidence is given up for good."""
    rates = taught()
    rates.turn(["r"])
    for _ in range(5):
        rates.record("r", draft(Evidence("other", 0.9)), 0)
    distrusted = rates.survival("r", draft(GOOD))[0]
    for _ in range(60):
        rates.turn(["r"])
        rates.record("r", Draft(), 0)

    assert rates.survival("r", draft(GOOD))[0] > distrusted
    for _ in range(10 * KIND_HALF_LIFE):
        rates.turn(["r"])
    assert rates.survival("r", draft(BAD))[0] == pytest.approx(0.5, abs=0.05)


def test_a_draft_without_evidence_is_judged_by_its_source_and_place() -> None:
    rates = AcceptanceRates()
    plain = Draft((1, 2, 3, 4, 5, 6), (Source.HEAD,) * 6)
    for _ in range(300):
        rates.turn(["teacher"])
        rates.record("teacher", plain, 1)
    rates.turn(["r"])

    survival = rates.survival("r", plain)

    assert len(survival) == 6
    assert survival[0] > 0.9
    assert survival[1] < 0.1
    assert survival == sorted(survival, reverse=True)


def test_sequences_that_left_are_forgotten() -> None:
    rates = AcceptanceRates()

    assert rates.turn(["a", "b"])
    assert not rates.turn(["b"])
    assert list(rates._fortunes) == ["b"]
    rates.record("gone", draft(GOOD), 1)
    assert list(rates._fortunes) == ["b"]


@pytest.mark.parametrize("prior", [0.0, 1.0, -1.0, float("nan")])
def test_a_prior_that_is_no_probability_is_refused(prior: float) -> None:
    with pytest.raises(ValueError, match="prior"):
        Evidence("x", prior)
    with pytest.raises(TypeError):
        Evidence([], 0.5)
