"""Training: it learns, it can be taken up again, and what it measures is what the engine does."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragspec.decoding.acceptance import Source
from ragspec.decoding.engine import Engine
from ragspec.decoding.head_drafter import LONGEST_DRAFT, HeadDrafter
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from ragspec.errors import InputError, SettingsError
from ragspec.heads.acceptance import measure
from ragspec.heads.batches import positions
from ragspec.heads.card import CARD, WEIGHTS, read_head_card
from ragspec.heads.checkpoint import load_head
from ragspec.heads.data import Progress as Written
from ragspec.heads.data import _changed, _fingerprint, write_answers, write_topic_answers
from ragspec.heads.loading import find_head, load_head_drafter, make_chain
from ragspec.heads.report import write_report
from ragspec.heads.store import HELD_BACK, AnswerWriter, answer_files, read_answers, read_card
from ragspec.heads.texts import Topic, TopicTexts
from ragspec.heads.training import LOG, Progress, Recipe, train
from ragspec.heads.walk import frozen_rows
from tests import tiny
from tests.unit.decoding.heads import random_head

RECIPE = Recipe(inner=64, draft_tokens=40, depth=3, epochs=3, batch=64, learning_rate=5e-3, patience=5)
WINDOW = 64
ANSWERS = 400


def requests(number: int) -> list[Request]:
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(0, 38, (number, 12), generator=generator).tolist()
    return [Request(f"rag-{i}-{i}", tuple(prompt), Sampling(max_tokens=40)) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_answers(tiny.smallest(), folder, requests(ANSWERS), source="a test", window=WINDOW)
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.smallest(), data, folder, RECIPE)
    return folder


def test_recorded_states_give_the_recorded_tokens(data: Path) -> None:
    """Row i of the hidden states is what token i was chosen by."""
    target = tiny.smallest()
    (path,) = answer_files(data)
    answers = read_answers(path)
    rows = target.output_rows(range(target.vocabulary))
    chosen = (answers.hidden.float() @ rows.T).argmax(-1)

    assert len(answers) == ANSWERS
    assert float((chosen == answers.tokens).float().mean()) > 0.97  # bfloat16 tips a near tie now and then


def test_no_answer_that_is_measured_on_is_trained_on(data: Path) -> None:
    answers = read_answers(answer_files(data)[0])
    learnt, held = (set(positions(answers, held_back=back).places.tolist()) for back in (False, True))

    assert learnt.isdisjoint(held)
    assert held
    assert len(learnt) > 10 * len(held)
    # A draft begins behind every token but an answer's last.
    assert len(learnt) + len(held) == len(answers.tokens) - len(answers)
    assert len(answers) > 2 * HELD_BACK


def test_training_raises_acceptance(trained: Path, data: Path) -> None:
    target, files = tiny.smallest(), answer_files(data)
    head, card = load_head(trained)
    raw = random_head(target, "recurrent", every=1)
    found = measure(head, frozen_rows(target, head), files, RECIPE.depth)
    before = measure(raw, frozen_rows(target, raw), files, RECIPE.depth)

    assert found.mean_acceptance_length > before.mean_acceptance_length + 0.05
    assert card.measured["mean_acceptance_length"] == pytest.approx(found.mean_acceptance_length, abs=0.02)


def test_what_is_measured_is_what_the_engine_does(trained: Path, data: Path) -> None:
    """Verify steps of the answers held back, with the head alone and as many draft tokens."""
    target = tiny.smallest()
    head, _ = load_head(trained)
    head = head.bfloat16().float()
    held = [request for i, request in enumerate(requests(ANSWERS)) if zlib.crc32(str(i).encode()) % HELD_BACK == 0]
    found = measure(head, frozen_rows(target, head), answer_files(data), LONGEST_DRAFT)
    # Drafts may end before their limit where a token of theirs would be the answer's last: then a step more is needed.
    engine = Engine(
        target, context_window=WINDOW, max_draft=LONGEST_DRAFT, drafters=[HeadDrafter(make_chain(head, target))]
    )
    for request in held:
        engine.add(request)
    steps = tokens = 0
    while engine.has_work:
        for done in engine.step():
            steps += done.acceptance.num_verify_steps
            tokens += done.completion_tokens - 1
            assert {Source.TARGET, Source.HEAD}.issuperset(done.acceptance.token_sources)

    assert tokens == sum(found.tokens.values())
    assert steps == pytest.approx(sum(found.steps.values()), abs=2 + 0.05 * steps)
    assert tokens > 1.1 * steps


def test_answers_about_one_thing_are_held_back_together(data: Path, tmp_path: Path) -> None:
    with AnswerWriter(tmp_path, read_card(data)) as writer:
        for number in range(400):
            for kind in ("rag", "qa"):
                writer.add(kind, f"thing {number}", [1, 2], torch.zeros(2, 16), prompt=f"{kind} {number}", text="a b")
    held = read_answers(answer_files(tmp_path)[0]).held_back

    assert held[::2].equal(held[1::2])
    assert 0 < int(held.sum()) < 40


def test_what_was_gathered_is_written_whatever_ends_it(data: Path, tmp_path: Path) -> None:
    def add_and_stop(writer: AnswerWriter) -> None:
        writer.add("rag", "a thing", [1, 2], torch.zeros(2, 16), prompt="what?", text="a b")
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
            "rag", "a thing", [1, 2], torch.zeros(1, 16), prompt="what?", text="a b"
        )


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(trained: Path, data: Path, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.by_place is not None and next(epochs) == 1:
            raise KeyboardInterrupt

    epochs = count()
    with pytest.raises(KeyboardInterrupt):
        train(tiny.smallest(), data, tmp_path, RECIPE, progress=stop)
    train(tiny.smallest(), data, tmp_path, RECIPE)

    assert (tmp_path / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    assert read_head_card(tmp_path) == read_head_card(trained)
    told = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["epoch"] for line in told if line["by_place"]] == [0, 1, 2], "the lost epoch is told once"
    assert told[-1]["step"] == told[-1]["steps"]


def test_a_folder_with_a_run_of_another_recipe_is_refused(trained: Path, data: Path) -> None:
    with pytest.raises(InputError, match="another recipe") as caught:
        train(tiny.smallest(), data, trained, replace(RECIPE, seed=1))
    assert caught.value.error_code == "other_recipe"


def test_a_folder_with_a_run_on_other_data_is_refused(trained: Path, data: Path, tmp_path: Path) -> None:
    for source in (*data.iterdir(), *trained.iterdir()):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    others = [replace(request, sampling=Sampling(max_tokens=39)) for request in requests(4)]
    write_answers(tiny.smallest(), tmp_path, others, source="a test", window=WINDOW)

    with pytest.raises(InputError) as caught:
        train(tiny.smallest(), tmp_path, tmp_path, RECIPE)
    assert caught.value.error_code == "other_recipe"


@pytest.mark.parametrize(
    ("field", "value"), [("learning_rate", float("nan")), ("learning_rate", -1.0), ("epochs", 0), ("step_weight", 0.0)]
)
def test_a_recipe_that_trains_nothing_is_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field.replace("_", "-")):
        Recipe(**{field: value})


def test_too_few_answers_are_refused(tmp_path: Path) -> None:
    write_answers(tiny.smallest(), tmp_path / "data", requests(1), source="a test", window=WINDOW)

    with pytest.raises(InputError, match="too few answers") as caught:
        train(tiny.smallest(), tmp_path / "data", tmp_path, RECIPE)
    assert caught.value.error_code == "no_head_data"


def test_a_head_of_another_target_is_not_trained_further(trained: Path, data: Path, tmp_path: Path) -> None:
    for path in trained.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    card = json.loads((trained / CARD).read_text())
    (tmp_path / CARD).write_text(json.dumps({**card, "target": "other@seed6"}))

    with pytest.raises(InputError, match="does not fit") as caught:
        train(tiny.smallest(), data, tmp_path / "out", RECIPE, start=tmp_path)
    assert caught.value.error_code == "other_target"


def test_a_head_can_be_trained_further_in_its_own_shape(trained: Path, data: Path, tmp_path: Path) -> None:
    other = replace(RECIPE, epochs=1, learning_rate=1e-3, depth=5, inner=32, draft_tokens=7)
    found = train(tiny.smallest(), data, tmp_path, other, start=trained)

    assert read_head_card(tmp_path).training["recipe"]["depth"] == RECIPE.depth
    assert len(found.by_place) == RECIPE.depth
    assert found.mean_acceptance_length >= read_head_card(trained).measured["mean_acceptance_length"] - 0.1


@pytest.mark.parametrize(
    "recipe", [replace(RECIPE, architecture="mlp", epochs=1), replace(RECIPE, loss="acceptance", epochs=1)]
)
def test_other_recipes_run(recipe: Recipe, data: Path, tmp_path: Path) -> None:
    train(tiny.smallest(), data, tmp_path, recipe)
    train(tiny.smallest(), data, tmp_path, recipe)  # finished: it goes on to nothing

    assert read_head_card(tmp_path).architecture == recipe.architecture
    assert load_head_drafter(str(tmp_path), tiny.smallest()) is not None


def test_the_report_shows_every_curve(trained: Path) -> None:
    page = write_report(trained).read_text(encoding="utf-8")

    assert page.count("<polyline") == 2 + RECIPE.depth
    assert "<script" not in page


def test_data_of_another_target_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds answers of smallest-llama@seed5") as caught:
        train(tiny.target("qwen2"), data, tmp_path, RECIPE)
    assert caught.value.error_code == "other_target"
    with pytest.raises(InputError) as caught:
        write_answers(tiny.target("qwen2"), data, requests(1), source="a test", window=WINDOW)
    assert caught.value.error_code == "other_target"


def test_a_folder_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        train(tiny.smallest(), tmp_path, tmp_path, RECIPE)
    assert caught.value.error_code == "no_head_data"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            replace(tiny.smallest(), identity="other@seed6+int8"),
            "it was trained for smallest-llama@seed5, the target is other",
        ),
        (tiny.target(), "its states are 16 wide, the target's 48"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(trained: Path, target: Target, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        find_head(str(trained), target)


def test_auto_and_none_need_no_head() -> None:
    assert find_head("auto", tiny.smallest()) is None
    assert find_head("none", tiny.smallest()) is None


def test_a_folder_without_a_head_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"RAGSPEC_HEAD=.*holds no speculation head"):
        find_head(str(tmp_path), tiny.smallest())


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": 5},
        {"architecture": None},
        {"depth": None},
        {"depth": "4"},
        {"depth": 0},
        {"inner": 0},
        {"hidden": "64"},
        {"vocabulary": True},
        {"epsilon": None},
        {"epsilon": float("nan")},
    ],
)
def test_a_card_with_wrong_values_is_refused_by_their_names(
    trained: Path, tmp_path: Path, wrong: dict[str, object]
) -> None:
    card = json.loads((trained / CARD).read_text()) | wrong
    (tmp_path / CARD).write_text(json.dumps(card))
    (tmp_path / WEIGHTS).write_bytes((trained / WEIGHTS).read_bytes())

    with pytest.raises(InputError, match=next(iter(wrong))) as caught:
        load_head(tmp_path)
    assert caught.value.error_code == "bad_head"


@pytest.mark.parametrize("damage", ["not finite", "twice", "falling", "two rows"])
def test_weights_that_no_head_has_are_refused(trained: Path, tmp_path: Path, damage: str) -> None:
    tensors = load_file(trained / WEIGHTS)
    tokens = tensors["draft_tokens"]
    match damage:
        case "not finite":
            name = next(name for name in tensors if name != "draft_tokens")
            tensors[name] = torch.full_like(tensors[name], float("nan"))
        case "twice":
            tensors["draft_tokens"] = torch.zeros_like(tokens)
        case "falling":
            tensors["draft_tokens"] = tokens.flip(0).contiguous()
        case _:
            tensors["draft_tokens"] = torch.stack([tokens, tokens])
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CARD).write_bytes((trained / CARD).read_bytes())

    with pytest.raises(InputError) as caught:
        load_head(tmp_path)
    assert caught.value.error_code == "bad_head"


@pytest.mark.parametrize("damage", ["cut", "other shape", "missing", "bad card"])
def test_a_damaged_head_is_refused(trained: Path, tmp_path: Path, damage: str) -> None:
    card = json.loads((trained / CARD).read_text())
    weights = (trained / WEIGHTS).read_bytes()
    if damage == "other shape":
        card["inner"] = 32
    (tmp_path / CARD).write_text("[]" if damage == "bad card" else json.dumps(card))
    if damage != "missing":
        (tmp_path / WEIGHTS).write_bytes(weights[:-100] if damage == "cut" else weights)

    with pytest.raises(InputError) as caught:
        load_head(tmp_path)
    assert caught.value.error_code == "bad_head"
