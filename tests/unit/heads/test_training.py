"""Training: it learns, it can be taken up again, and what it measures is what the engine does."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from ragspec.decoding.acceptance import Source
from ragspec.decoding.engine import Engine
from ragspec.decoding.head_drafter import LONGEST_DRAFT, HeadDrafter
from ragspec.decoding.request import Sampling
from ragspec.errors import InputError
from ragspec.heads.acceptance import measure
from ragspec.heads.batches import positions
from ragspec.heads.card import CARD, WEIGHTS, read_head_card
from ragspec.heads.checkpoint import load_head
from ragspec.heads.data import write_answers
from ragspec.heads.loading import load_head_drafter, make_chain
from ragspec.heads.report import write_report
from ragspec.heads.store import HELD_BACK, answer_files, read_answers
from ragspec.heads.training import LOG, Progress, Recipe, train
from ragspec.heads.walking import make_walker
from tests import tiny
from tests.unit.decoding.heads import random_head
from tests.unit.heads.recorded import ANSWERS, RECIPE, WINDOW, requests


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
    found = measure(make_walker(head, target), files, RECIPE.depth)
    before = measure(make_walker(raw, target), files, RECIPE.depth)

    assert found.mean_acceptance_length > before.mean_acceptance_length + 0.05
    assert card.measured["mean_acceptance_length"] == pytest.approx(found.mean_acceptance_length, abs=0.02)


def test_what_is_measured_is_what_the_engine_does(trained: Path, data: Path) -> None:
    """Verify steps of the answers held back, with the head alone and as many draft tokens."""
    target = tiny.smallest()
    head, _ = load_head(trained)
    head = head.bfloat16().float()
    held = [request for i, request in enumerate(requests(ANSWERS)) if zlib.crc32(str(i).encode()) % HELD_BACK == 0]
    found = measure(make_walker(head, target), answer_files(data), LONGEST_DRAFT)
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
