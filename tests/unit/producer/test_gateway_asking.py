"""What the gateway makes of what a worker says."""

from __future__ import annotations

import pytest

from producer.gateway.asking import Told, raise_if_failed
from producer.gateway.errors import GatewayError
from ragspec.asking.events import Delta, Finished, Started
from ragspec.jobs.answer import Answer


def delta(start: int, text: str) -> Delta:
    """One token a character."""
    return Delta(start=start, tokens=list(map(ord, text)), sources=["target"] * len(text), text=text)


def test_what_a_second_worker_says_again_is_not_told_again() -> None:
    told = Told()
    events = [
        Started(worker="a", model="m"),
        delta(0, "abc"),
        delta(3, "de"),
        Started(worker="b", model="m"),
        delta(0, "ab"),
        delta(2, "cdefg"),
        delta(7, "h"),
        Finished(answer=Answer(0, "completed", "abcdefgh")),
    ]
    fresh = [told.only_fresh(event) for event in events]

    found = [event for event in fresh if isinstance(event, Delta)]
    assert [(one.start, one.text, one.tokens) for one in found] == [
        (start, text, list(map(ord, text))) for start, text in ((0, "abc"), (3, "de"), (5, "fg"), (7, "h"))
    ]
    assert fresh[4] is None
    assert [type(event) for event in fresh].count(Started) == 2


def test_text_that_is_held_back_longer_the_second_time_is_told_once() -> None:
    """The same tokens in other steps: which text is certain after which token may differ."""
    told = Told()
    first = Delta(start=0, tokens=[1, 2], sources=["target"] * 2, text="ab")
    again = [
        Delta(start=0, tokens=[1], sources=["target"], text=""),
        Delta(start=1, tokens=[2, 3], sources=["target"] * 2, text="abc"),
    ]

    found = [told.only_fresh(event) for event in (first, Started(worker="b", model="m"), *again)]

    assert found[2] is None
    assert found[3] == Delta(start=2, tokens=[3], sources=["target"], text="c")


def test_of_an_unknown_collection_no_other_is_named() -> None:
    answer = Answer(0, "failed", error_code="unknown_collection", error_message="There are tenant-1-secret, public.")

    with pytest.raises(GatewayError) as caught:
        raise_if_failed(answer)
    assert caught.value.status == 404
    assert "secret" not in str(caught.value)
