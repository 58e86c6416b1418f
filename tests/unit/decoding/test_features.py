"""The hidden states between a target's layers, of every token of a step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.engine import Engine
from ragspec.decoding.native.build import load_kernels
from ragspec.decoding.native.decoder import Decoder
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from tests import tiny
from tests.unit.decoding import drafters
from tests.unit.decoding.test_native import make_model

LENGTH = 60
#: Two texts in chunks that share steps: slot, start, end of each segment.
STEPS = [[(3, 0, 20)], [(1, 0, 13), (3, 20, 21)], [(3, 21, 60), (1, 13, 17)], [(1, 17, 60)]]


def texts() -> dict[int, list[int]]:
    rng = random.Random(4)
    return {slot: [rng.randrange(250) for _ in range(LENGTH)] for slot in (1, 3)}


def features(target: Target, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """Of both texts, [length, layers, hidden], as the steps give them; only some rows' logits are wanted, or none."""
    cache = target.make_cache(5, LENGTH)
    found: dict[int, list[torch.Tensor]] = {1: [], 3: []}
    with torch.inference_mode():
        for number, step in enumerate(STEPS):
            segments = [Segment(slot, start, end - start) for slot, start, end in step]
            tokens = [token for slot, start, end in step for token in texts()[slot][start:end]]
            out = target.forward(cache, segments, tokens, [len(tokens) - 1][: number % 2], features=layers)
            for segment, part in zip(segments, out.features.split([s.length for s in segments]), strict=True):
                found[segment.slot].append(part)
    return {slot: torch.cat(parts) for slot, parts in found.items()}


def expected(model: torch.nn.Module, text: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """By transformers alone, whole; its last hidden state is behind the final norm, so there its norm is taken of ours."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    finally:
        model.set_attn_implementation("ragspec")
    return torch.stack([states[layer][0] for layer in layers], 1)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_features_are_what_enters_each_layer_and_leaves_the_last(family: str) -> None:
    target = tiny.target(family)
    layers = (2, 0, 3, 1)
    found = features(target, layers)

    for slot, text in texts().items():
        ours = found[slot].clone()
        with torch.inference_mode():
            ours[:, 2] = target.model.get_decoder().norm(ours[:, 2])
        torch.testing.assert_close(ours, expected(target.model, text, layers), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layers", [(0, 2, 1, 3), (2, 0, 1)])
def test_features_in_eight_bits_are_nearly_those_of_the_model(layers: tuple[int, ...], kernels: Path) -> None:
    """With what leaves the last layer, which else is computed for wanted rows only, and without."""
    model = make_model("qwen3")
    native = Decoder(load_kernels(kernels), model, LENGTH)

    class Native:
        make_cache = native.make_cache

        def forward(self, cache, segments, tokens, rows, *, features):
            return native.forward(cache, segments, tokens, rows, features)

    found = features(Native(), layers)

    for slot, text in texts().items():
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
            theirs = torch.stack([states[layer][0] for layer in layers], 1)
            ours = found[slot].clone()
            if 3 in layers:
                ours[:, layers.index(3)] = model.model.norm(ours[:, layers.index(3)])
        assert float(torch.cosine_similarity(ours, theirs, dim=-1).min()) > 0.98
        torch.testing.assert_close(ours.norm(dim=-1), theirs.norm(dim=-1), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("layers", [(1,), (3, 0)])
def test_who_reads_features_changes_no_number_in_eight_bits(layers: tuple[int, ...], kernels: Path) -> None:
    target = tiny.int8(kernels)
    with torch.inference_mode():
        plain, read = (
            [
                target.forward(cache, [Segment(0, start, 8)], texts()[1][start : start + 8], rows, features=asked)
                for start, rows in ((0, []), (8, [7, 2, 5]))
            ]
            for asked, cache in (((), target.make_cache(1, LENGTH)), (layers, target.make_cache(1, LENGTH)))
        )

    assert plain[1].logits.equal(read[1].logits)
    assert plain[1].normalizers.equal(read[1].normalizers)


def test_nobody_who_does_not_ask_gets_features(kernels: Path) -> None:
    for target in (tiny.target(), tiny.int8(kernels)):
        cache = target.make_cache(1, LENGTH)
        with torch.inference_mode():
            assert target.forward(cache, [Segment(0, 0, 3)], [1, 2, 3], [2]).features is None
        assert target.layers == 3


def test_readers_are_told_of_every_token_that_stands() -> None:
    """Chunks and accepted drafts, once each, with the token behind and the layers asked for; of plain requests too."""
    target = tiny.target()
    written = [*texts().values(), *texts().values()]
    prompts = {name: tuple(written[i][: 10 + 9 * i]) for i, name in enumerate("abcd")}
    requests = [
        Request(name, prompt, Sampling(max_tokens=20, speculation=name != "c")) for name, prompt in prompts.items()
    ]
    answers = {request.id: tiny.generate(target, request) for request in requests}
    readers = drafters.Reads(2, 0), drafters.Reads(1)
    oracle = drafters.NoisyOracle(answers, target.vocabulary)

    engine = Engine(target, max_batch=3, prefill_chunk=7, drafters=[*readers, oracle], prefix_cache=0)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        running = {name: (one.slot, one.cached) for name, one in engine._scheduler.running.items()}
        engine.step()
        for reader in readers:
            assert all(
                running[name] == (one.slot, one.cached) for name, one in reader.standings.items() if name in running
            )

    for name, prompt in prompts.items():
        whole = [*prompt, *answers[name]]
        theirs = expected(target.model, whole, (0, 1, 2))
        for reader in readers:
            told = reader.told[name]
            assert sorted(told) == list(range(len(whole) - 1))
            assert [token for _, (token, _) in sorted(told.items())] == whole[1:]
            found = torch.stack([row for _, (_, row) in sorted(told.items())])
            torch.testing.assert_close(found, theirs[:-1, list(reader.features)], rtol=1e-3, atol=1e-3)
