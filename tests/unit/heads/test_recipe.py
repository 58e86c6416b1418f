"""The parts of the shipped head's recipe that need no target: texts, questions, what is excluded, and the stages' record."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError, ServiceUnavailableError
from ragspec.heads.recipe import sources
from ragspec.heads.recipe.documents import Document, read_folder, read_source
from ragspec.heads.recipe.exclusion import Exclusion, read_exclusion
from ragspec.heads.recipe.plan import Corpus, Prompt, allowed_topics, plan, read_plan, write_plan
from ragspec.heads.recipe.questions import ask, labels, names
from ragspec.heads.recipe.sources import ASKS, RECALLS, SOURCES, Source, fetch
from ragspec.heads.recipe.stages import Stages
from ragspec.heads.store import is_held_back

BY_NAME = {source.name: source for source in SOURCES}
LONG = "The Department of State sent word to Congress on the day that the treaty with Peru was signed. " * 3


def corpus(documents: int = 12, passages: int = 8) -> Corpus:
    texts = [
        Document(
            f"Land {number}",
            tuple(f"In Land {number} the River Oder {place} is long and wide." for place in range(passages)),
        )
        for number in range(documents)
    ]
    return Corpus(texts, 1, ASKS, RECALLS)


def test_eight_words_in_a_row_are_known_again_and_seven_are_not() -> None:
    excluded = Exclusion(["One two, three four five six seven eight nine"])

    assert "He said: TWO three four five six seven eight nine!" in excluded
    assert "two three four five six seven eight" not in excluded
    assert "one two three four five six seven and eight" not in excluded


def test_a_shorter_excluded_text_excludes_itself_only() -> None:
    excluded = Exclusion(["What is the capital of Peru?", "..."])

    assert "what is the capital of Peru" in excluded
    assert "What is the capital of Peru and of Chile, of Ecuador and Brazil?" not in excluded
    assert "" not in excluded


def test_every_string_of_json_is_excluded_and_bad_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"turns": ["Who was the first?", {"deep": "And who the last?"}]}) + "\n"
    )
    (tmp_path / "bad.json").write_text("{")

    excluded = read_exclusion([tmp_path / "prompts.jsonl"])

    assert "who was the first" in excluded
    assert "and who the last" in excluded
    with pytest.raises(InputError, match=r"bad\.json"):
        read_exclusion([tmp_path / "bad.json"])


def test_names_are_phrases_and_the_words_outside_them() -> None:
    assert names("The Department of State told Peru, and Congress, of it. Nobody knew.") == [
        "The Department of State",
        "Peru",
        "Congress",
    ]
    assert labels("Climate: mild\nGDP per head: low\nnone: of it") == ["climate", "GDP per head"]


def test_a_question_is_asked_only_of_what_the_passage_has() -> None:
    rng = random.Random(0)

    asked = {ask(ASKS, "Peru", "nothing here has a name", rng) for _ in range(20)}

    assert asked == {"What is the main point of the text about Peru?"}
    assert ask(["Who is {name}?"], "Peru", "nothing here has a name", rng) is None
    assert ask(["{label} and {other_label}?"], "Peru", "Climate: mild", rng) is None


def test_a_plan_asks_each_kind_equally_often_about_passages_of_one_document() -> None:
    prompts = plan([corpus()], 40, Exclusion(), seed=0)

    assert [sum(prompt.kind == kind for prompt in prompts) for kind in ("rag", "summary", "qa", "context")] == [10] * 4
    for prompt in prompts:
        assert all(text.startswith(f"In {prompt.title} ") for text in prompt.passages)
        assert prompt.kind != "qa" or not prompt.passages
        assert prompt.kind not in {"rag", "context"} or 1 <= len(prompt.passages) <= 3
    assert {len(prompt.passages) for prompt in prompts if prompt.kind == "rag"} == {1, 2, 3}
    assert prompts == plan([corpus()], 40, Exclusion(), seed=0)
    assert prompts != plan([corpus()], 40, Exclusion(), seed=1)


def test_a_plan_ends_with_its_passages_and_keeps_out_what_is_excluded() -> None:
    everything = plan([corpus()], 1000, Exclusion(), seed=0)
    shared = "In Land 3 the River Oder 5 is long"

    prompts = plan([corpus()], 1000, Exclusion([shared, "Tell me about River Oder."]), seed=0)

    assert len(everything) == 96
    assert any(text.startswith(shared) for prompt in everything for text in prompt.passages)
    assert any(prompt.question == "Tell me about River Oder." for prompt in everything)
    assert not any(text.startswith(shared) for prompt in prompts for text in prompt.passages)
    assert not any(prompt.question == "Tell me about River Oder." for prompt in prompts)


def test_a_topic_with_an_excluded_question_is_left_out() -> None:
    everything = {topic.name for topic in allowed_topics(Exclusion())}

    assert everything - {topic.name for topic in allowed_topics(Exclusion(["What is the capital of Austria?"]))} == {
        "Austria"
    }


def test_one_of_each_kind_in_forty_is_about_a_document_held_back() -> None:
    prompts = plan([corpus(documents=200)], 320, Exclusion(), seed=0)

    held = [number for number, prompt in enumerate(prompts) if is_held_back(prompt.title)]

    assert held == [0, 1, 2, 3, 160, 161, 162, 163]


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    prompts = [Prompt("rag", "Perú", "Who?", ("a", "b")), Prompt("qa", "x", "What?", ())]
    write_plan(prompts, tmp_path / "plan.jsonl")

    assert read_plan(tmp_path / "plan.jsonl") == prompts


def member(source: Source) -> str:
    return source.members.replace("*", "one")


def archive(folder: Path, source: Source, content: Any) -> Path:
    path = folder / source.archive
    data = json.dumps(content).encode()
    if source.members.endswith(".gz"):
        data = gzip.compress(data)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(member(source), data)
            wheel.writestr("another/file.py", "")
    else:
        with tarfile.open(path, "w:gz") as tarball:
            info = tarfile.TarInfo(member(source))
            info.size = len(data)
            tarball.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("name", "content", "title", "begins"),
    [
        (
            "factbook",
            {
                "Government": {"Country name": {"conventional short form": {"text": "Peru"}}},
                "Geography": {"Area": {"land": {"text": LONG}, "note": "<p>not&nbsp;counted</p>"}},
            },
            "Peru",
            "Area: land The Department of State",
        ),
        (
            "sotu",
            {"year": 1901, "name": "A", "text": LONG},
            "State of the Union address of 1901 by A",
            "The Department",
        ),
        (
            "services",
            {
                "metadata": {"serviceFullName": "Amazon X"},
                "operations": {"Put": {"documentation": f"<p>{LONG}</p>"}, "Bare": {}},
            },
            "Amazon X",
            "Put: The Department",
        ),
        (
            "moby-dick",
            {"chapter": "1", "title": "Loomings.", "text": LONG},
            "Moby Dick, chapter 1: Loomings",
            "The Dep",
        ),
    ],
)
def test_each_source_is_read_out_of_its_archive(
    name: str, content: Any, title: str, begins: str, tmp_path: Path
) -> None:
    source = BY_NAME[name]

    (document,) = read_source(source, archive(tmp_path, source, content))

    assert document.title == title
    assert any(line.startswith(begins) for passage in document.passages for line in passage.splitlines())
    assert "<" not in "".join(document.passages)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short to ask about.")

    with pytest.raises(InputError, match="holds no text of 25 words"):
        read_folder(tmp_path)

    (tmp_path / "long.md").write_text(LONG)
    assert [document.title for document in read_folder(tmp_path)] == ["long"]


def test_an_archive_is_fetched_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(SOURCES[0], archive="text.whl", sha256=sha256(b"x").hexdigest())

    def fetching(word: str) -> None:
        script = f"printf {word} > {tmp_path / 'text.whl'}"
        monkeypatch.setitem(sources._COMMANDS, "pip", lambda *_: ["sh", "-c", script])

    fetching("y")
    with pytest.raises(ServiceUnavailableError, match="differs from its known checksum"):
        fetch(source, tmp_path)
    fetching("x")
    assert fetch(source, tmp_path).read_text() == "x"
    monkeypatch.setitem(sources._COMMANDS, "pip", lambda *_: ["no-such-client"])
    assert fetch(source, tmp_path).read_text() == "x"
    with pytest.raises(ServiceUnavailableError, match=r"'factbook' .* no command `no-such-client`"):
        fetch(source, tmp_path / "elsewhere")


def test_a_stage_is_done_once_and_other_options_are_refused(tmp_path: Path) -> None:
    calls: list[int] = []

    def work() -> dict[str, int]:
        calls.append(1)
        return {"found": 3}

    assert Stages(tmp_path, {"seed": 0}).run("first", work)
    again = Stages(tmp_path, {"seed": 0})
    assert not again.run("first", work)

    assert len(calls) == 1
    assert again.done["first"]["found"] == 3
    with pytest.raises(InputError, match="begun with another seed"):
        Stages(tmp_path, {"seed": 1})


def test_a_stage_that_failed_is_done_again(tmp_path: Path) -> None:
    def fail() -> dict[str, int]:
        raise InputError("no")

    with pytest.raises(InputError):
        Stages(tmp_path, {}).run("first", fail)

    assert Stages(tmp_path, {}).run("first", dict)
