"""Training an attention head: what it is led along is what it drafts, and it learns."""

from __future__ import annotations

import zlib
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ragspec.decoding.engine import Engine
from ragspec.decoding.head_drafter import LONGEST_DRAFT
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from ragspec.errors import InputError, SettingsError
from ragspec.heads import attention_walk
from ragspec.heads.acceptance import measure
from ragspec.heads.attention_walk import AttentionWalker
from ragspec.heads.batches import positions
from ragspec.heads.card import WEIGHTS, HeadCard, read_head_card
from ragspec.heads.checkpoint import load_head, save_head
from ragspec.heads.data import write_answers
from ragspec.heads.loading import find_head, load_head_drafter
from ragspec.heads.shape import ATTENTION
from ragspec.heads.store import HELD_BACK, AnswerWriter, answer_files, read_answers, read_card
from ragspec.heads.training import Progress, Recipe, train
from ragspec.heads.walk import Place, Walker, judged
from ragspec.heads.walking import make_walker
from tests import tiny
from tests.unit.decoding.heads import random_head
from tests.unit.heads import published

RECIPE = Recipe("attention", inner=48, draft_tokens=40, depth=3, epochs=3, batch=128, learning_rate=5e-3, patience=5)
WINDOW = 64
ANSWERS = 300


def requests(number: int = ANSWERS) -> list[Request]:
    """Prompts of 3 to 15 tokens."""
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(0, 38, (number, 15), generator=generator).tolist()
    return [Request(f"rag-{i}-{i}", tuple(p[: 3 + i % 13]), Sampling(max_tokens=30)) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_answers(tiny.smallest(), folder, requests(), source="a test", window=WINDOW)
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.smallest(), data, folder, RECIPE)
    return folder


def held_back() -> list[Request]:
    return [request for i, request in enumerate(requests()) if zlib.crc32(str(i).encode()) % HELD_BACK == 0]


def test_each_answer_is_recorded_with_its_prompt(data: Path) -> None:
    answers = read_answers(answer_files(data)[0])
    asked = {tuple(answers.prompt(number).tolist()) for number in range(len(answers))}

    assert asked == {request.prompt for request in requests()}


def test_batches_take_answers_whole(data: Path) -> None:
    """Each once, its places in order, though the answers are shuffled."""
    answers = read_answers(answer_files(data)[0])
    whole = AttentionWalker(random_head(tiny.smallest(), "attention"), tiny.smallest()).positions(
        answers, held_back=False
    )
    plain = positions(answers, held_back=False)
    batches = list(whole.shuffled(torch.Generator().manual_seed(1)).split(100))
    seen: list[int] = []
    for batch in batches:
        assert len(batch.places) < 100 + 30
        for number, rows in batch.each():
            start, end = answers.starts[number : number + 2].tolist()
            assert batch.places[rows].tolist() == list(range(start, end - 1))
            assert batch.ahead[rows].tolist() == [end - 1 - place for place in range(start, end - 1)]
            seen.append(number)

    assert len(seen) == len(set(seen)) > 200
    assert sum(len(batch.places) for batch in batches) == len(plain.places)
    assert seen != sorted(seen)
    assert all(len(batch.places) >= 100 for batch in batches[:-1])


def test_a_file_that_is_wholly_held_back_has_no_batches(data: Path) -> None:
    answers = read_answers(answer_files(data)[0])
    held = replace(answers, held_back=torch.ones_like(answers.held_back))
    walker = AttentionWalker(random_head(tiny.smallest(), "attention"), tiny.smallest())

    assert list(walker.positions(held, held_back=False).shuffled(torch.Generator()).split(100)) == []
    assert len(walker.positions(held, held_back=True).each()) > 200


def exact(walker: Walker, target: Target) -> Walker:
    """The same over the target's rows as they are, not in bfloat16."""
    frozen = walker._frozen
    rows = target.embedding_rows(range(target.vocabulary)), target.output_rows(frozen.tokens.tolist())
    walker._frozen = replace(frozen, embedding=rows[0], output=rows[1])
    return walker


@pytest.mark.parametrize("own_rows", [False, True])
def test_the_walk_scores_what_the_head_drafts(own_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of an answer and four tokens on, as if all had been drafted right: the reference's tokens, as surely."""
    target, depth = tiny.target(), 4
    config = published.configuration(target, draft_vocab_size=target.vocabulary)
    tensors = published.weights(published.configuration(target))
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    if own_rows:
        tensors["lm_head.weight"] = target.output_rows(range(target.vocabulary)).flip(0)
    folder = published.write(tmp_path / "head", config, tensors)
    asked = [replace(request, sampling=Sampling(max_tokens=9)) for request in requests(6)]
    write_answers(target, tmp_path / "data", asked, source="a test", window=WINDOW)
    answers = read_answers(answer_files(tmp_path / "data")[0])
    walker = exact(make_walker(load_head(folder)[0], target), target)
    batch = walker.positions(answers, held_back=False)

    def all_right(*given: Any) -> Place:
        at = judged(*given)
        return replace(at, accepted=torch.ones_like(at.accepted))

    monkeypatch.setattr("ragspec.heads.attention_walk.judged", all_right)
    found: list[list[tuple[int, float]]] = [[] for _ in batch.places]
    with torch.inference_mode():
        for place in walker.walk(batch, depth):
            for row, scores in zip(place.rows.tolist(), place.scores, strict=True):
                found[row].append((int(scores.argmax()), float(scores.softmax(-1).max())))

    reference = published.Reference(folder, target, (2, 1, 0))
    for number, rows in batch.each():
        start, end = answers.starts[number : number + 2].tolist()
        prompt, written = answers.prompt(number).tolist(), answers.tokens[start:end].tolist()
        for row in rows.tolist():
            so_far = int(batch.places[row]) - start + 1
            ahead = written[so_far : so_far + depth]
            tokens, sure = reference.draft([*prompt, *written[:so_far]], len(ahead), instead=ahead)
            assert [token for token, _ in found[row]] == tokens
            assert [probability for _, probability in found[row]] == pytest.approx(sure, rel=1e-3)


def test_training_raises_acceptance(trained: Path, data: Path) -> None:
    target, files = tiny.smallest(), answer_files(data)
    head, card = load_head(trained)
    found = measure(make_walker(head, target), files, RECIPE.depth)
    before = measure(make_walker(random_head(target, "attention", every=1), target), files, RECIPE.depth)

    assert found.mean_acceptance_length > before.mean_acceptance_length + 0.05
    assert card.measured["mean_acceptance_length"] == pytest.approx(found.mean_acceptance_length, abs=0.02)
    assert card.architecture == "attention"


def test_what_is_measured_is_what_the_engine_does(trained: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify steps of the answers held back, with the head alone: the walk's later places are the chain's."""
    target = tiny.smallest()
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: autocast("cpu", enabled=False))
    walker = exact(make_walker(load_head(trained)[0], target), target)
    found = measure(walker, answer_files(data), LONGEST_DRAFT)
    drafter = load_head_drafter(str(trained), target)
    engine = Engine(target, context_window=WINDOW, max_draft=LONGEST_DRAFT, drafters=[drafter])
    for request in held_back():
        engine.add(request)
    steps = tokens = 0
    while engine.has_work:
        for done in engine.step():
            steps += done.acceptance.num_verify_steps
            tokens += done.completion_tokens - 1

    assert tokens == sum(found.tokens.values())
    assert steps == pytest.approx(sum(found.steps.values()), abs=2 + 0.05 * steps)
    assert tokens > 1.1 * steps


def test_every_weight_gets_a_gradient(data: Path) -> None:
    target = tiny.smallest()
    walker = make_walker(random_head(target, "attention").requires_grad_(requires_grad=True), target)
    batch = next(walker.positions(read_answers(answer_files(data)[0]), held_back=False).split(200))
    with torch.autocast("cpu", torch.bfloat16):
        total = sum(place.scores.float().logsumexp(-1).sum() for place in walker.walk(batch, 2))
    total.backward()

    assert {
        name for name, weight in walker.head.named_parameters() if weight.grad is None or not weight.grad.any()
    } == set()


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


def test_a_head_can_be_trained_further_in_its_own_shape(trained: Path, data: Path, tmp_path: Path) -> None:
    found = train(tiny.smallest(), data, tmp_path, Recipe(epochs=1, inner=16, learning_rate=1e-3), start=trained)

    assert read_head_card(tmp_path).attention == read_head_card(trained).attention
    assert found.mean_acceptance_length >= read_head_card(trained).measured["mean_acceptance_length"] - 0.1


def test_answers_without_their_prompts_are_refused(data: Path, tmp_path: Path) -> None:
    """As they were recorded before heads could attend; other heads are trained on them as ever."""
    path = answer_files(data)[0]
    with safe_open(path, framework="pt") as file:
        kinds = file.metadata()
    tensors = {name: value for name, value in load_file(path).items() if not name.startswith("prompt")}
    with AnswerWriter(tmp_path, read_card(data)):
        save_file(tensors, tmp_path / path.name, metadata=kinds)

    with pytest.raises(InputError, match="without their prompts") as caught:
        train(tiny.smallest(), tmp_path, tmp_path / "out", RECIPE)
    assert caught.value.error_code == "no_head_data"
    train(tiny.smallest(), tmp_path, tmp_path / "out", replace(RECIPE, architecture="recurrent", epochs=1))


def test_a_target_that_hides_its_layers_has_no_attention_head(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(tiny.smallest()), "layers", 0)

    with pytest.raises(InputError, match="cannot be had") as caught:
        train(tiny.smallest(), data, tmp_path, RECIPE)
    assert caught.value.error_code == "bad_option"
    with pytest.raises(SettingsError, match="these cannot be had"):
        find_head(str(random_card(tmp_path / "head")), tiny.smallest())


def random_card(folder: Path) -> Path:
    """The folder of a head of random weights."""
    target = tiny.smallest()
    head = random_head(target, "attention")
    layer = None if head.shape.attention is None else asdict(head.shape.attention)
    card = HeadCard(ATTENTION, target.identity, target.vocabulary, target.hidden_size, 64, 3, 1e-5, attention=layer)
    save_head(head, card, folder)
    return folder


def test_a_long_text_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass the scores of all its tokens would need room at once."""
    target = tiny.smallest()
    walker = AttentionWalker(random_head(target, "attention"), target)
    tokens = list(range(30))
    whole = walker._features(tokens)
    lengths: list[int] = []
    forward = type(target).forward

    def watched(self: Any, cache: Any, segments: Any, *given: Any, **wanted: Any) -> Any:
        lengths.extend(segment.length for segment in segments)
        return forward(self, cache, segments, *given, **wanted)

    monkeypatch.setattr(type(target), "forward", watched)
    monkeypatch.setattr(attention_walk, "CHUNK", 7)
    found = walker._features(tokens)

    assert lengths == [7, 7, 7, 7, 2]
    torch.testing.assert_close(found, whole, rtol=0.02, atol=0.02)


def test_a_head_in_eight_bits_reads_the_features_of_eight_bits(kernels: Path, tmp_path: Path) -> None:
    target: Target = tiny.int8(kernels)
    asked = [Request(f"rag-{i}-{i}", r.prompt, Sampling(max_tokens=12)) for i, r in enumerate(requests(200))]
    write_answers(target, tmp_path / "data", asked, source="a test", window=WINDOW)
    train(target, tmp_path / "data", tmp_path / "head", replace(RECIPE, epochs=1, draft_tokens=250))

    drafter = load_head_drafter(str(tmp_path / "head"), target)
    assert drafter is not None
    assert drafter.identity.startswith("attention@")
