"""The step of fixed shape gives what the packed step gives, and touches nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ragspec.decoding import static_step
from ragspec.decoding.attention import Segment
from ragspec.decoding.cache import SlotCache
from ragspec.decoding.static_step import Bucket, StaticStep, bucket_of, make_outputs
from ragspec.decoding.transformers_target import TransformersTarget
from tests import tiny
from tests.unit.decoding.tape import Tape

SLOTS, CAPACITY = 6, 96
#: Whose inputs are wanted.
LAYERS = (2, 0, 3)
#: float32: sums over a longer context or more rows are rounded in another order.
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def much_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any step of short segments has a bucket, whatever part of it is padding."""
    monkeypatch.setattr(static_step, "MOST_PADDING", static_step.MOST_TOKENS)


class Pair:
    """Two caches of one target that hold the same: one is written by packed steps, the other by static ones."""

    def __init__(self, target: TransformersTarget, seed: int) -> None:
        self.target = target
        self.rng = random.Random(seed)
        self.packed, self.static = (target.make_cache(SLOTS, CAPACITY) for _ in range(2))
        self.outputs = make_outputs(SLOTS, target.vocabulary, target.hidden_size, torch.float32, target.device)
        self.steps: dict[Bucket, StaticStep] = {}
        for slot in range(SLOTS):
            # Beyond where sequences will be too, as the last tenant leaves it.
            prompt = [Segment(slot, 0, self.rng.randint(60, CAPACITY))]
            tokens = self.tokens(prompt)
            for cache in (self.packed, self.static):
                target.forward(cache, prompt, tokens, [])

    def tokens(self, segments: Sequence[Segment]) -> list[int]:
        return [self.rng.randrange(self.target.vocabulary) for _ in range(sum(s.length for s in segments))]

    def draw(self) -> list[Segment]:
        """Some of the slots, in any order, each somewhere in its text; the last places of a slot too."""
        segments = []
        for slot in self.rng.sample(range(SLOTS), self.rng.randint(1, SLOTS)):
            length = self.rng.choice([1, 1, 2, 3, 5, 9, 12])
            start = self.rng.choice([self.rng.randint(1, CAPACITY - length), CAPACITY - length])
            segments.append(Segment(slot, start, length))
        return segments

    def step(self, segments: Sequence[Segment]) -> StaticStep:
        bucket = bucket_of(segments, SLOTS, CAPACITY, LAYERS)
        assert bucket is not None
        return self.steps.setdefault(bucket, StaticStep(bucket, self.static, self.outputs, torch.float32))


@pytest.mark.usefixtures("much_padding")
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@torch.inference_mode()
def test_static_and_packed_steps_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In numbers, in tokens and in what they leave in the cache; the same buffers serve one step after another."""
    monkeypatch.setattr(static_step, "LEAST_CONTEXT", 32)
    pair = Pair(tiny.target(family), seed=3)
    for _ in range(40):
        segments = pair.draw()
        tokens = pair.tokens(segments)
        rows = sorted(pair.rng.sample(range(len(tokens)), pair.rng.randint(1, len(tokens))))
        before = contents(pair.static)

        expected = pair.target.forward(pair.packed, segments, tokens, rows, hidden=True, features=LAYERS)
        step = pair.step(segments)
        step.fill(segments, tokens, rows)
        step.run(pair.target._compute)
        found = step.output(len(rows), hidden=True)

        assert torch.equal(found.choices, expected.choices)
        for name in ("logits", "normalizers", "hidden", "features"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), **ROUNDING)
        after, packed = contents(pair.static), contents(pair.packed)
        written = torch.zeros((SLOTS, CAPACITY), dtype=torch.bool)
        for segment in segments:
            written[segment.slot, segment.start : segment.end] = True
        for old, new, other in zip(before, after, packed, strict=True):
            assert torch.equal(old.transpose(1, 2)[~written], new.transpose(1, 2)[~written])
            torch.testing.assert_close(new, other, **ROUNDING)
    assert len(pair.steps) > 10


def contents(cache: SlotCache) -> list[Tensor]:
    """What anybody may read of a cache: keys and values of each layer, [slots, kv_heads, capacity, dim]."""
    tensors = [*cache._keys.values(), *cache._values.values()]
    return [tensor[:, :, :CAPACITY].clone() for tensor in tensors]


@pytest.mark.usefixtures("much_padding")
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@torch.inference_mode()
def test_a_static_step_is_the_same_operations_whatever_it_is_filled_with(family: str) -> None:
    """None of which waits for the device, brings numbers from the host, or gives a shape that depends on data."""
    pair = Pair(tiny.target(family), seed=5)
    step = pair.step([Segment(3, 90, 4)])
    tapes = []
    for segments in ([Segment(3, 90, 4)], [Segment(0, 20, 2), Segment(2, 1, 1)], [Segment(s, 30, 4) for s in range(4)]):
        step.fill(segments, tokens := pair.tokens(segments), list(range(len(tokens))))
        with Tape() as tape:
            step.run(pair.target._compute)
        tapes.append(tape.shapes)

    assert tapes[0] == tapes[1] == tapes[2]


@torch.inference_mode()
def test_a_slot_whose_numbers_went_wrong_spoils_no_other() -> None:
    """Its own rows are no numbers, as in a packed step, and the engine wipes it then."""
    pair = Pair(tiny.target(), seed=7)
    segments = [Segment(0, 40, 2), Segment(2, 40, 2)]
    tokens = pair.tokens(segments)
    for cache in (pair.packed, pair.static):
        for tensor in (*cache._keys.values(), *cache._values.values()):
            tensor[[1, 2], :, :10] = torch.nan

    expected = pair.target.forward(pair.packed, segments, tokens, [0, 1, 2, 3])
    step = pair.step(segments)
    step.fill(segments, tokens, [0, 1, 2, 3])
    step.run(pair.target._compute)
    found = step.output(4, hidden=False)

    assert found.normalizers.isfinite().tolist() == [True, True, False, False]
    torch.testing.assert_close(found.logits[:2], expected.logits[:2], **ROUNDING)


@pytest.mark.parametrize(
    ("segments", "bucket"),
    [
        ([Segment(0, 10, 1)], Bucket(1, 1, 256)),
        ([Segment(0, 20, 1), Segment(2, 10, 1)], Bucket(4, 1, 256)),
        ([Segment(4, 10, 3), Segment(1, 10, 4), Segment(0, 10, 1)], Bucket(6, 4, 256)),
        ([Segment(1, 255, 1)], Bucket(2, 1, 256)),
        ([Segment(1, 256, 1)], Bucket(2, 1, 384)),
        ([Segment(1, 384, 1)], Bucket(2, 1, 512)),
        ([Segment(0, 512, 9), Segment(1, 0, 1)], Bucket(2, 12, 768)),
        ([Segment(0, 900, 5)], Bucket(1, 8, 1000)),
        ([Segment(0, 10, 13)], None),
        ([Segment(0, 10, 1), Segment(1, 10, 400)], None),
    ],
)
def test_the_least_bucket_that_holds_a_step_is_taken(segments: list[Segment], bucket: Bucket | None) -> None:
    """Of a cache of 6 slots and 1,000 places; prompt chunks have none."""
    assert bucket_of(segments, 6, 1000) == bucket


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(3, 10, 2)],
        [Segment(3, 10, 3)],
        [Segment(slot, 10, 1) for slot in range(3)] + [Segment(3, 10, 12)],
    ],
)
def test_what_would_mostly_be_padding_has_no_bucket(segments: list[Segment], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence alone in a high slot, and a long draft beside short ones: nothing has priced what a bucket adds to them."""
    assert bucket_of(segments, 6, 1000) is None
    monkeypatch.setattr(static_step, "MOST_PADDING", 6)
    assert bucket_of(segments, 6, 1000) is not None


def test_wide_steps_have_no_bucket() -> None:
    most = static_step.MOST_TOKENS
    assert bucket_of([Segment(slot, 0, 8) for slot in range(most // 8)], most, 100) is not None
    assert bucket_of([Segment(slot, 0, 8) for slot in range(most // 8 + 1)], most, 100) is None
