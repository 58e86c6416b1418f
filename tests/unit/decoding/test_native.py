"""The int8 kernels compute the model, and a row's result is a function of its own sequence."""

from __future__ import annotations

import platform
import random
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ragspec.decoding.attention import Segment
from ragspec.decoding.engine import Engine
from ragspec.decoding.native.build import BuildError, load_kernels
from ragspec.decoding.native.decoder import Decoder, misfit
from ragspec.decoding.native.target import MisfitError, NativeTarget, make_native_target
from ragspec.decoding.native.weights import rotate
from ragspec.decoding.request import Request, Sampling
from tests import tiny
from tests.unit.decoding import drafters

LENGTH = 200
#: This processor, and one without AVX-512, for which the compiler writes other instructions.
MACHINES = ["native", "x86-64-v3"] if platform.machine() == "x86_64" else ["native"]


def make_model(family: str, **shape: object) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = tiny.config(family, **{**tiny.INT8_SHAPE, **shape})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def make_tokens(count: int, seed: int = 1) -> list[int]:
    return [random.Random(seed).randrange(tiny.VOCABULARY) for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_the_kernels_compute_what_the_model_computes(family: str, machine: str, head_dim: int, kernels: Path) -> None:
    """Grouped heads, biases, norms on queries and a window; with this machine's instructions and without them."""
    model = make_model(family, head_dim=head_dim)
    decoder = Decoder(load_kernels(kernels, machine), model, LENGTH)
    tokens = make_tokens(LENGTH)
    with torch.inference_mode():
        out = decoder.forward(decoder.make_cache(3, LENGTH), [Segment(1, 0, LENGTH)], tokens, list(range(LENGTH)))
        theirs = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)

    divergence = _divergence(theirs.logits[0], out.logits)
    assert float(divergence.mean()) < 0.02
    assert float(divergence.max()) < 0.2
    similar = torch.cosine_similarity(out.hidden, theirs.hidden_states[-1][0])
    assert float(similar.min()) > 0.99
    assert torch.equal(out.choices.long(), out.logits.argmax(-1))
    torch.testing.assert_close(out.normalizers, out.logits.logsumexp(-1))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_row_depends_on_nothing_beside_it(threads: int, kernels: Path) -> None:
    """Chunks, neighbours, slots, copied prefixes, threads and which rows are wanted change no bit of any logit."""
    decoder = Decoder(load_kernels(kernels), make_model("mistral"), LENGTH)
    texts = [make_tokens(LENGTH, seed) for seed in range(4)]
    texts[3] = texts[0][:150] + texts[3][150:]
    with torch.inference_mode():
        alone = []
        for text in texts:
            cache = decoder.make_cache(1, LENGTH)
            rows = [decoder.forward(cache, [Segment(0, i, 1)], [token], [0]).logits for i, token in enumerate(text)]
            alone.append(torch.cat(rows))
        torch.set_num_threads(threads)
        rng = random.Random(5)
        cache = decoder.make_cache(6, LENGTH)
        slots, done, compared = [5, 0, 3, 2], [0] * 4, 0
        while min(done) < LENGTH:
            if done[3] == 0 and done[0] >= 150:
                cache.copy_prefix(slots[0], slots[3], 150)
                done[3] = 150
            active = [i for i in range(4) if done[i] < LENGTH and (i < 3 or done[3])]
            picked = rng.sample(active, rng.randint(1, len(active)))
            if rng.random() < 0.1:
                time.sleep(0.002)  # long enough for the threads to fall asleep
            lengths = [min(rng.choice([1, 2, 5, 13, 70]), LENGTH - done[i]) for i in picked]
            segments = [Segment(slots[i], done[i], n) for i, n in zip(picked, lengths, strict=True)]
            fed = [t for i, n in zip(picked, lengths, strict=True) for t in texts[i][done[i] : done[i] + n]]
            owners = [(i, done[i] + place) for i, n in zip(picked, lengths, strict=True) for place in range(n)]
            wanted = rng.choice([list(range(len(fed))), rng.sample(range(len(fed)), rng.randint(0, len(fed)))])
            logits = decoder.forward(cache, segments, fed, wanted).logits
            compared += len(wanted)
            for row, at in enumerate(wanted):
                text, place = owners[at]
                assert torch.equal(logits[row], alone[text][place])
            for i, n in zip(picked, lengths, strict=True):
                done[i] += n
    assert compared > LENGTH


def test_a_window_hides_what_lies_before_it(kernels: Path) -> None:
    """Changing a token that has left every layer's window changes nothing; one inside changes the logits."""
    model = make_model("mistral")
    decoder = Decoder(load_kernels(kernels), model, LENGTH)
    reach = 3 * 23  # three layers, each 23 tokens back
    tokens = make_tokens(LENGTH)
    last = []
    for changed in (None, LENGTH - 2 - reach, LENGTH - 1 - reach):
        text = [(t + 1) % tiny.VOCABULARY if i == changed else t for i, t in enumerate(tokens)]
        with torch.inference_mode():
            out = decoder.forward(decoder.make_cache(1, LENGTH), [Segment(0, 0, LENGTH)], text, [LENGTH - 1])
        last.append(out.logits[0])

    assert torch.equal(last[0], last[1])
    assert not torch.equal(last[0], last[2])


@pytest.mark.parametrize("factor", [1.0, 30.0, 1000.0])
def test_gates_far_from_zero_are_what_they_are(factor: float, kernels: Path) -> None:
    """silu(-100) is nothing, not -100 and not NaN."""
    model = make_model("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data *= factor
    decoder = Decoder(load_kernels(kernels), model, LENGTH)
    tokens = make_tokens(60)
    with torch.inference_mode():
        ours = decoder.forward(decoder.make_cache(1, 60), [Segment(0, 0, 60)], tokens, list(range(60)))
        theirs = model(input_ids=torch.tensor([tokens]))

    assert torch.isfinite(ours.logits).all()
    assert float(_divergence(theirs.logits[0], ours.logits).mean()) < 0.05


def test_what_is_no_number_is_told(kernels: Path) -> None:
    """A NaN in one sequence's weights or keys reaches its own normalizers, and its neighbour's logits keep every bit."""
    decoder = Decoder(load_kernels(kernels), make_model("llama"), LENGTH)
    tokens = make_tokens(40)
    segments, wanted = [Segment(0, 20, 20), Segment(1, 20, 20)], [19, 39]
    with torch.inference_mode():
        clean, spoilt = decoder.make_cache(2, LENGTH), decoder.make_cache(2, LENGTH)
        for cache in (clean, spoilt):
            decoder.forward(cache, [Segment(0, 0, 20), Segment(1, 0, 20)], tokens, [0])
        spoilt.values[0, 0, 0, 3] = torch.nan
        expected = decoder.forward(clean, segments, tokens, wanted)
        found = decoder.forward(spoilt, segments, tokens, wanted)

    assert not torch.isfinite(found.normalizers[0])
    assert torch.equal(found.logits[1], expected.logits[1])


def test_rotated_rows_keep_their_products() -> None:
    """A rotation is orthogonal, so rotated activations times rotated weights is what it was."""
    x, weight = torch.randn(5, 208, dtype=torch.float64), torch.randn(7, 208, dtype=torch.float64)

    torch.testing.assert_close(
        rotate(x.float()) @ rotate(weight.float()).T, (x @ weight.T).float(), atol=1e-4, rtol=1e-4
    )
    assert float(rotate(torch.eye(208)[:1] * 100).abs().max()) < 40  # what one huge number becomes


def test_answers_do_not_change_with_the_batch_or_the_drafts(kernels: Path) -> None:
    """What float32 keeps up to ties, int8 keeps bit for bit: tokens and log-probabilities."""
    target = make_native_target(make_model("llama"), tiny.tokenizer(), "tiny+int8", kernels)
    requests = [Request(f"r{i}", tuple(make_tokens(20 + 9 * i, i)), Sampling(max_tokens=40)) for i in range(12)]
    expected = _answers(Engine(target, max_batch=1, max_draft=0), requests)
    oracle = drafters.NoisyOracle({name: ids for name, (ids, _) in expected.items()}, target.vocabulary)

    assert _answers(Engine(target, max_batch=7, prefill_chunk=33, drafters=[oracle]), requests) == expected
    assert _answers(Engine(target, max_batch=12), requests) == expected


def test_models_that_the_kernels_do_not_compute_are_told_why(kernels: Path) -> None:
    """Another architecture, another activation, widths that do not fit: each by its name."""
    assert misfit(make_model("gemma2")) == "its architecture is gemma2, not one of llama, mistral, qwen2, qwen3"
    odd = AutoModelForCausalLM.from_config(
        tiny.config("llama", **{**tiny.INT8_SHAPE, "head_dim": 8}), dtype=torch.float32
    )
    with pytest.raises(MisfitError, match="head dimension 8"):
        make_native_target(odd, tiny.tokenizer(), "odd", kernels)


def test_a_model_that_eight_bits_do_not_carry_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load compares distributions, not merely that it runs."""
    monkeypatch.setattr("ragspec.decoding.native.weights.rotate", lambda rows: rows)

    with pytest.raises(MisfitError, match="diverge by"):
        make_native_target(make_model("llama"), tiny.tokenizer(), "wrong", kernels)


def test_a_machine_without_a_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then `auto` goes on in another precision."""
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        load_kernels(tmp_path)


def _divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    log = expected.float().log_softmax(-1)
    return (log.exp() * (log - found.log_softmax(-1))).sum(-1)


def _answers(engine: Engine, requests: list[Request]) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    assert isinstance(engine.target, NativeTarget)
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_work:
        for completion in engine.step():
            done[completion.request_id] = (completion.acceptance.token_ids, completion.acceptance.token_logprobs)
    return done
