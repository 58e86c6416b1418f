"""Drafts of a published attention head in the engine are those of the head alone over the whole text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.decoding.draft import FREE_STAKES, Draft, Stakes
from ragspec.decoding.engine import Engine
from ragspec.decoding.feature_drafter import AttentionDrafter
from ragspec.decoding.head_drafter import LONGEST_DRAFT
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.heads.checkpoint import load_head
from ragspec.heads.loading import load_head_drafter, make_chain
from tests import tiny
from tests.unit.decoding.heads import random_head
from tests.unit.heads import published

#: EAGLE-3's choice in a target of three layers: the inputs of layers 2, 3 // 2 and 3 - 3.
LAYERS = (2, 1, 0)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = published.configuration(tiny.target())
    return published.write(tmp_path_factory.mktemp("eagle3"), config, published.weights(config))


class Watched:
    """An engine whose head's drafts are kept, each with the text that it was drafted behind."""

    def __init__(self, head: Path, **options: Any) -> None:
        drafter = load_head_drafter(str(head), tiny.target())
        assert isinstance(drafter, AttentionDrafter)
        self.drafter = drafter
        self.engine = Engine(tiny.target(), drafters=[drafter], **options)
        self.drafts: list[tuple[str, tuple[int, ...], Draft]] = []
        self._propose = drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, limits: Mapping[str, int], stakes: Stakes = FREE_STAKES) -> Mapping[str, Draft]:
        drafts = self._propose(limits, stakes)
        for name, draft in drafts.items():
            sequence = self.engine._scheduler.running[name]
            self.drafts.append((name, (*sequence.request.prompt, *sequence.tokens), draft))
        return drafts

    def run(self, *requests: Request) -> dict[str, Completion]:
        for request in requests:
            self.engine.add(request)
        done = {}
        while self.engine.has_work:
            done |= {completion.request_id: completion for completion in self.engine.step()}
        return done

    def check(self, reference: published.Reference, *, least: int, own: bool = False) -> None:
        """Every draft is the reference's, and there are so many at least, most of them long and few alike."""
        for name, text, draft in self.drafts:
            prompt = self.drafts_prompt(name) if own else ()
            expected, _ = reference.draft(text, len(draft.tokens), prompt)
            assert list(draft.tokens) == expected, f"{name} behind {len(text)} tokens"
        assert len(self.drafts) >= least
        assert len({draft.tokens for _, _, draft in self.drafts}) > 0.8 * least
        assert sum(len(draft.tokens) == LONGEST_DRAFT for _, _, draft in self.drafts) > 0.5 * least
        assert not self.engine.drafter_failures

    def drafts_prompt(self, name: str) -> Sequence[int]:
        return PROMPTS[name]


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(250, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


PROMPTS = {f"r{seed}": text(seed, length) for seed, length in enumerate([1, 2, 7, 16, 30, 47])}


def requests(**sampling: Any) -> list[Request]:
    return [Request(name, prompt, Sampling(**({"max_tokens": 24} | sampling))) for name, prompt in PROMPTS.items()]


@pytest.mark.parametrize(("batch", "chunk"), [(1, 512), (6, 512), (4, 5)], ids=["alone", "ragged", "chunked"])
def test_drafts_are_those_of_the_whole_text(head: Path, batch: int, chunk: int) -> None:
    watched = Watched(head, max_batch=batch, prefill_chunk=chunk)
    done = watched.run(*requests())

    watched.check(published.Reference(head, tiny.target(), LAYERS), least=100)
    for request in requests():
        assert done[request.id].acceptance.token_ids == tiny.generate(tiny.target(), request)


def test_accepted_drafts_are_followed_too(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that knows the answers drafts beside the head: stretches of several tokens, and refused ones behind them."""
    target = tiny.target()
    watched = Watched(head, max_batch=3)
    answers = {request.id: tiny.generate(target, request) for request in requests()}
    propose = watched.drafter.propose

    def half_known(limits: Mapping[str, int], stakes: Stakes = FREE_STAKES) -> Mapping[str, Draft]:
        drafts = dict(propose(limits, stakes))
        for name, draft in drafts.items():
            written = len(watched.engine._scheduler.running[name].tokens)
            known = answers[name][written : written + 2]
            drafts[name] = Draft((*known, *draft.tokens[2:])[: len(draft.tokens)], draft.sources)
        return drafts

    watched.drafter.propose = half_known
    done = watched.run(*requests())

    watched.check(published.Reference(head, target, LAYERS), least=40)
    accepted = [done[name].acceptance.per_step_accepted for name in answers]
    assert sum(map(sum, accepted)) > 60
    assert sum(drafted.num_draft_tokens for drafted in (c.acceptance for c in done.values())) > 200


def test_a_head_with_its_own_output_rows_drafts_from_its_own_vocabulary_alone(head: Path) -> None:
    """The target's rows for a prompt's tokens are of another scale than the head's."""
    own, borrowing = load_head(head)[0], random_head(tiny.target(), "attention")

    assert make_chain(own, tiny.target()).extras(range(9)) is None
    assert make_chain(borrowing, tiny.target()).extras(range(9)).tokens == [1, 3, 5, 7]


def test_the_longest_draft_fits_behind_a_text_that_fills_the_window(head: Path) -> None:
    """All sequences walk as far as the one with the most room: others walk on behind the end of their slots' texts."""
    watched = Watched(head, max_batch=2, context_window=48)
    watched.engine.add(Request("full", text(5, 30), Sampling(max_tokens=100)))
    for _ in range(15):
        watched.engine.step()
    watched.run(Request("fresh", text(6, 5), Sampling(max_tokens=20)))

    watched.check(published.Reference(head, tiny.target(), LAYERS), least=30)
    assert min(48 - len(text) for name, text, _ in watched.drafts if name == "full") < 3


def test_a_prefix_comes_with_its_draft_cache(head: Path) -> None:
    """The next turn of a conversation begins where the last one ended, in another slot or from a kept one."""
    watched = Watched(head, max_batch=2, prefix_cache=0.5)
    done = watched.run(*requests())
    watched.drafts.clear()
    turns = [
        Request(f"{name}+", (*PROMPTS[name], *completion.acceptance.token_ids, *text(9, 5)), Sampling(max_tokens=16))
        for name, completion in done.items()
    ]
    found = watched.run(*turns)

    watched.check(published.Reference(head, tiny.target(), LAYERS), least=60)
    assert all(turn.cached_prompt_tokens > 16 for turn in found.values())


def test_behind_a_fork_the_last_shared_position_keeps_the_token_of_the_first_text(head: Path) -> None:
    """Its key was computed with the embedding of what followed there; that only ever changes drafts."""
    target = tiny.target()
    watched = Watched(head, max_batch=1)
    shared, first, second = text(1, 30), 7, 8
    watched.run(Request("first", (*shared, first, *text(2, 4)), Sampling(max_tokens=4)))
    watched.drafts.clear()
    (forked,) = watched.run(Request("second", (*shared, second, *text(3, 4)), Sampling(max_tokens=16))).values()

    assert forked.cached_prompt_tokens == len(shared)
    reference = published.Reference(head, target, LAYERS)
    for _, behind, draft in watched.drafts:
        expected, _ = reference.draft(behind, len(draft.tokens), behind={len(shared) - 1: first})
        assert list(draft.tokens) == expected
    assert len(watched.drafts) > 8


def test_a_sequence_that_was_preempted_goes_on_in_another_slot(head: Path) -> None:
    target = tiny.target()
    watched = Watched(head, max_batch=2, prefix_cache=0.5)
    bulk = [Request(name, PROMPTS[name], Sampling(max_tokens=24)) for name in ("r3", "r4", "r5")]
    for request in bulk:
        watched.engine.add(request)
    slots: dict[str, set[int]] = {request.id: set() for request in bulk}
    done, steps = {}, 0
    while watched.engine.has_work:
        steps += 1
        if steps == 4:  # both give way; the slot that is free first was the other's
            for length in (9, 2):
                urgent = Request(f"urgent{length}", text(length, 20), Sampling(max_tokens=length), interactive=True)
                watched.engine.add(urgent)
        done |= {completion.request_id: completion for completion in watched.engine.step()}
        for name, sequence in watched.engine._scheduler.running.items():
            if name in slots and sequence.tokens:
                slots[name].add(sequence.slot)

    watched.check(published.Reference(head, target, LAYERS), least=50)
    assert any(len(used) > 1 for used in slots.values())
    for request in bulk:
        assert done[request.id].acceptance.token_ids == tiny.generate(target, request)


def test_where_a_step_was_interrupted_the_head_waits_for_the_next(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not told of that step: its state is of an older token than the target's cache holds."""
    watched = Watched(head, max_batch=2)
    for request in requests()[2:4]:
        watched.engine.add(request)
    for _ in range(6):
        watched.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(watched.drafter, "follow", interrupt)
        with pytest.raises(KeyboardInterrupt):
            watched.engine.step()

    drafted = len(watched.drafts)
    assert watched.engine.step() == []
    assert len(watched.drafts) == drafted
    done = watched.run()
    assert len(watched.drafts) > drafted
    for request in requests()[2:4]:
        assert done[request.id].acceptance.token_ids == tiny.generate(tiny.target(), request)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


VARIANTS: dict[str, dict[str, Any]] = {
    "layers as vLLM counts them": {"eagle_aux_hidden_state_layer_ids": [1, 2, 0]},
    "layers as SGLang counts them": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]}},
    "scaled positions": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "positions of Llama 3.1": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "no head dimension": {"head_dim": None},
    "layers.0": {},
    "inside a model": {},
    "own embeddings": {},
    "narrower": {"hidden_size": 32, "target_hidden_size": 48},
    "the target's output rows": {},
    "the target's output rows, all": {"draft_vocab_size": None},
    "two features": {"eagle_aux_hidden_state_layer_ids": [2, 1]},
    "tokens out of order": {},
}
READ = {
    "layers as vLLM counts them": (1, 2, 0),
    "layers as SGLang counts them": (1, 2, 1),
    "two features": (2, 1),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_layout_are_read(variant: str, tmp_path: Path) -> None:
    target = tiny.target()
    config = published.configuration(target, **VARIANTS[variant])
    layers = READ.get(variant, LAYERS)
    tensors = published.weights({"draft_vocab_size": target.vocabulary // 2} | config, features=len(layers))
    generator = torch.Generator().manual_seed(3)
    match variant:
        case "own embeddings" | "narrower":
            tensors["embed_tokens.weight"] = torch.randn(
                (target.vocabulary, config["hidden_size"]), generator=generator
            )
        case "the target's output rows":
            del tensors["lm_head.weight"]
        case "the target's output rows, all":
            tensors = {name: value for name, value in tensors.items() if name not in {"lm_head.weight", "d2t", "t2d"}}
        case "tokens out of order":
            places = torch.arange(len(tensors["d2t"]))
            tensors["d2t"] = (tensors["d2t"] + places)[torch.randperm(len(places), generator=generator)] - places
    folder = published.write(tmp_path, config, tensors)
    reference = published.Reference(folder, target, layers)
    if variant == "layers.0":
        published.write(folder, config, {name.replace("midlayer.", "layers.0."): w for name, w in tensors.items()})
    if variant == "inside a model":
        published.write(folder, config, {f"model.{name}": weight for name, weight in tensors.items()})
    watched = Watched(folder, max_batch=4)
    watched.run(*requests(max_tokens=12))

    watched.check(reference, least=40, own=True)
