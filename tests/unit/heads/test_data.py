"""Recording what heads are trained on: once, whatever stops it, and held back by what it is about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ragspec.decoding.request import Request, Sampling
from ragspec.errors import InputError
from ragspec.heads.data import Progress as Written
from ragspec.heads.data import _changed, _fingerprint, write_answers, write_topic_answers
from ragspec.heads.store import AnswerWriter, answer_files, read_answers, read_card
from ragspec.heads.texts import Topic, TopicTexts
from tests import tiny
from tests.unit.heads.recorded import ANSWERS, WINDOW, requests


def test_recorded_states_give_the_recorded_tokens(data: Path) -> None:
    """Row i of the hidden states is what token i was chosen by."""
    target = tiny.smallest()
    (path,) = answer_files(data)
    answers = read_answers(path)
    rows = target.output_rows(range(target.vocabulary))
    chosen = (answers.hidden.float() @ rows.T).argmax(-1)

    assert len(answers) == ANSWERS
    assert float((chosen == answers.tokens).float().mean()) > 0.97  # bfloat16 tips a near tie now and then


def test_answers_about_one_thing_are_held_back_together(data: Path, tmp_path: Path) -> None:
    with AnswerWriter(tmp_path, read_card(data)) as writer:
        for number in range(400):
            for kind in ("rag", "qa"):
                prompt = f"{kind} {number}"
                writer.add(
                    kind, f"thing {number}", [1, 2], torch.zeros(2, 16), prompt=prompt, prompt_tokens=[5], text="a b"
                )
    held = read_answers(answer_files(tmp_path)[0]).held_back

    assert held[::2].equal(held[1::2])
    assert 0 < int(held.sum()) < 40


def test_what_was_gathered_is_written_whatever_ends_it(data: Path, tmp_path: Path) -> None:
    def add_and_stop(writer: AnswerWriter) -> None:
        writer.add("rag", "a thing", [1, 2], torch.zeros(2, 16), prompt="what?", prompt_tokens=[5], text="a b")
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), AnswerWriter(tmp_path, read_card(data)) as writer:
            add_and_stop(writer)

    assert [read_answers(path).tokens.tolist() for path in answer_files(tmp_path)] == [[1, 2], [1, 2]]


def test_data_that_was_stopped_goes_on_where_it_stopped(data: Path, tmp_path: Path) -> None:
    """What is answered is not answered again, and in the end the folder holds what one run would have written."""

    def stop(_kind: str, answers: int, _tokens: int) -> None:
        if answers == 150:
            raise KeyboardInterrupt

    def record(progress: Written | None = None) -> int:
        return write_answers(
            tiny.smallest(), tmp_path, requests(ANSWERS), source="a test", window=WINDOW, progress=progress
        )

    with pytest.raises(KeyboardInterrupt):
        record(stop)
    (first,) = (len(read_answers(path)) for path in answer_files(tmp_path))
    rest = record()
    again = record()

    stopped, whole = (
        sorted(
            tuple(answers.tokens[start:end].tolist())
            for answers in map(read_answers, answer_files(folder))
            for start, end in pairwise(answers.starts.tolist())
        )
        for folder in (tmp_path, data)
    )
    assert first == 150
    assert (rest > 0, again) == (True, 0)
    assert stopped == whole


def test_topics_that_were_stopped_between_texts_and_answers_go_on(tmp_path: Path) -> None:
    """The answers need the texts of the earlier run as their passages."""

    def stop(kind: str, _answers: int, _tokens: int) -> None:
        if kind != "text":
            raise KeyboardInterrupt

    target = tiny.target()
    with pytest.raises(KeyboardInterrupt):
        write_topic_answers(target, tmp_path / "stopped", topics=3, seed=40, progress=stop)
    write_topic_answers(target, tmp_path / "stopped", topics=3, seed=40)
    write_topic_answers(target, tmp_path / "whole", topics=3, seed=40)

    kinds = [
        sorted(kind for path in answer_files(tmp_path / name) for kind in read_answers(path).kinds)
        for name in ("stopped", "whole")
    ]
    assert kinds[0] == kinds[1]
    assert write_topic_answers(target, tmp_path / "stopped", topics=3, seed=40) == 0


def test_topics_are_drawn_from_those_that_are_given(tmp_path: Path) -> None:
    write_topic_answers(tiny.target(), tmp_path, topics=3, among=[Topic("tea", "its history", ("What is tea?",))])

    assert sum(read_answers(path).kinds.count("text") for path in answer_files(tmp_path)) == 1


def test_a_prompt_that_comes_again_while_it_is_answered_is_answered_once(tmp_path: Path) -> None:
    twice = [replace(request, id=f"qa-{i}-{i}") for i, request in enumerate(requests(3) * 2)]

    write_answers(tiny.smallest(), tmp_path, twice, source="a test", window=WINDOW)

    assert [len(read_answers(path)) for path in answer_files(tmp_path)] == [3]


def test_a_text_that_is_asked_for_twice_serves_both_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the fifth are asked for in the same form."""
    given: list[dict[int, str]] = []

    def note(_plan: TopicTexts, texts: dict[int, str]) -> list[Request]:
        given.append(texts)
        return []

    monkeypatch.setattr("ragspec.heads.data.read_topics", lambda: [Topic("tea", "its history", ("What is {}?",))] * 5)
    monkeypatch.setattr(TopicTexts, "answers", note)
    write_topic_answers(tiny.target(), tmp_path)

    (texts,) = given
    assert sorted(texts) == [0, 1, 2, 3, 4]
    assert texts[0] == texts[4]
    assert [len(read_answers(path)) for path in answer_files(tmp_path)] == [4]


def test_a_fingerprint_stays_as_it_is_where_an_option_is_added() -> None:
    """Folders of earlier versions hold it: what they answer is not to be answered again."""

    @dataclass(frozen=True)
    class Later(Sampling):
        beams: int = 1

    prompts = [_fingerprint((1, 2, 3), _changed(kind(max_tokens=40, stop=("a",)))) for kind in (Sampling, Later)]

    assert prompts == ["39387471132ab9ec74be98cd5bc183d66aa0269428604600eaa625174c871a67"] * 2
    assert _fingerprint((1, 2, 3), _changed(Later(max_tokens=40, stop=("a",), beams=2))) != prompts[0]


@pytest.mark.parametrize("number", [0, 2])
def test_where_there_is_nothing_to_answer_nobody_hears_that_it_is_answered(number: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none that fits the window of 8 tokens") as caught:
        write_answers(tiny.smallest(), tmp_path, requests(number), source="a test", window=8)
    assert caught.value.error_code == "no_head_data"


def test_states_that_are_not_the_tokens_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 states for 2 tokens"):
        AnswerWriter(tmp_path, read_card(data)).add(
            "rag", "a thing", [1, 2], torch.zeros(1, 16), prompt="what?", prompt_tokens=[5], text="a b"
        )
