"""What gateways and workers tell each other of single questions."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from ragspec.asking.beat import FRESH_S, Beat, fresh_workers
from ragspec.asking.events import EVENTS, Delta, Finished, Rejected, Started
from ragspec.asking.message import AskMessage
from ragspec.jobs.answer import Answer
from ragspec.jobs.options import AnswerOptions


def test_events_come_back_as_they_were() -> None:
    delta = Delta(start=2, tokens=[5, 6], sources=["head", "target"], text="é\n")
    answer = Answer(0, "completed", "x", "stop", passages=[{"id": "p", "score": 0.5}], token_logprobs=[-0.25])
    for event in (Started(worker="h:1", model="m"), delta, Finished(answer=answer), Rejected(code="c", message="m")):
        assert EVENTS.validate_json(event.model_dump_json()) == event
    assert delta.followed_by(Delta(start=4, tokens=[7], sources=["job"], text="!")) == Delta(
        start=2, tokens=[5, 6, 7], sources=["head", "target", "job"], text="é\n!"
    )


def test_a_message_says_what_is_wrong_with_it() -> None:
    good = {
        "id": "a",
        "question": "?",
        "options": AnswerOptions(collection="c").model_dump(mode="json"),
        "reply_to": "r",
        "sent_at": 1.0,
        "deadline": 2.0,
    }
    assert AskMessage.model_validate(good).options.collection == "c"
    for name, wrong in (("id", ""), ("question", ""), ("options", {}), ("deadline", "soon"), ("strange", 1)):
        with pytest.raises(ValidationError, match=name):
            AskMessage.model_validate(good | {name: wrong})


def test_only_workers_that_said_so_lately_count() -> None:
    now = 1000.0
    fields = {
        b"here:1": Beat(now - 1, "m", 0, 2).dump().encode(),
        b"gone:2": Beat(now - FRESH_S - 0.1, "m", 0, 0).dump().encode(),
        b"old:3": json.dumps({"at": now}).encode(),
        b"odd:4": b"nonsense",
        b"odd:5": b"[1]",
        b"odd:6": json.dumps({"at": "x", "model": "m", "waiting": 0, "running": 0}).encode(),
    }

    assert fresh_workers(fields, now) == {"here:1": Beat(now - 1, "m", 0, 2)}
