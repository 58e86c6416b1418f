"""A head's chain says the same in 8 bits as in torch, and ends where drafting stops to pay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.draft import Stakes
from ragspec.decoding.feature_drafter import FeatureHead
from ragspec.decoding.head_drafter import ChainHead, Drafts, Ending, HeadDrafter, Place, Reach
from ragspec.decoding.native.head import NativeHead
from ragspec.decoding.request import Request
from ragspec.decoding.target import Target
from ragspec.heads.chain import TorchChain
from ragspec.heads.loading import make_chain
from tests import tiny
from tests.unit.decoding.heads import ARCHITECTURES, STATE_ARCHITECTURES, random_head

STEPS = 5


def states(target: Target, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(target.hidden_size, generator=generator) for _ in range(count)]


def endings(target: Target, chain: ChainHead, count: int, own: Sequence[Iterable[int]] = ((),)) -> list[Ending]:
    """So many endings behind the tokens 0, 1, ..., with tokens of their own in turn."""
    extras = [chain.extras(tokens) for tokens in own]
    known = attended(target, chain, count) if hasattr(chain, "layers") else [(s, None) for s in states(target, count)]
    return [Ending(state, row, extras[row % len(own)], place) for row, (state, place) in enumerate(known)]


def attended(target: Target, chain: FeatureHead, count: int) -> list[tuple[torch.Tensor, Place]]:
    """States behind texts of one to four tokens, in slots of their own."""
    cache = chain.make_cache(count, 16)
    segments = [Segment(row, 0, 1 + row % 4) for row in range(count)]
    following = [token % 7 for row, segment in enumerate(segments) for token in (*range(segment.length - 1), row)]
    shape = (len(following), len(chain.layers), target.hidden_size)
    features = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    ends = itertools.accumulate(segment.length for segment in segments)
    found = chain.extend(cache, segments, following, features)
    return [
        (found[end - 1], Place(cache, segment.slot, segment.length - 1))
        for end, segment in zip(ends, segments, strict=True)
    ]


def drafts_of(drafts: Drafts) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return list(zip(drafts.tokens, drafts.probabilities, strict=True))


@pytest.fixture(scope="module", params=["float32", "int8"])
def target(request: pytest.FixtureRequest, kernels: Path) -> Target:
    return tiny.target() if request.param == "float32" else tiny.int8(kernels)


@pytest.fixture(params=ARCHITECTURES)
def chain(request: pytest.FixtureRequest, target: Target) -> ChainHead:
    return make_chain(random_head(target, request.param), target)


@pytest.fixture(params=STATE_ARCHITECTURES)
def state_chain(request: pytest.FixtureRequest, target: Target) -> ChainHead:
    return make_chain(random_head(target, request.param), target)


def test_the_kernels_draft_what_torch_drafts(kernels: Path) -> None:
    """8 bits may tip a near tie, and all behind it: most drafts are the same, and then their probabilities nearly are."""
    target = tiny.int8(kernels)
    head = random_head(target, "recurrent")
    native, reference = make_chain(head, target), TorchChain(head, target)
    assert isinstance(native, NativeHead)
    count = 64
    own = [range(i) for i in range(count)]

    ours, theirs = (
        drafts_of(chain.draft(endings(target, chain, count, own), Reach(STEPS))) for chain in (native, reference)
    )

    same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a[0] == b[0]]
    assert len(same) > 0.8 * count
    for (_, one), (_, other) in same:
        assert one == pytest.approx(other, abs=0.1)


def test_a_token_beside_the_vocabulary_is_scored_as_one_inside(kernels: Path) -> None:
    """The same token as row of the draft vocabulary and as extra, in every panel of the packed matrix: the same to rounding."""
    target = tiny.int8(kernels)
    whole = make_chain(random_head(target, "recurrent", every=1), target)
    few = make_chain(random_head(target, "recurrent", every=200), target)
    count = 64

    inside = whole.draft(endings(target, whole, count), Reach(1))
    beside = few.draft(endings(target, few, count, [range(target.vocabulary)]), Reach(1))

    assert list(inside.tokens) == list(beside.tokens)
    assert len({tokens[0] // 64 for tokens in inside.tokens}) > 2
    for one, other in zip(inside.probabilities, beside.probabilities, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_row_does_not_depend_on_its_neighbours(chain: ChainHead, target: Target) -> None:
    given = endings(target, chain, 7, [(1, 3, 5)])
    together = drafts_of(chain.draft(given, Reach(STEPS)))

    for row, ending in enumerate(given):
        (alone,) = drafts_of(chain.draft([ending], Reach(STEPS)))
        assert alone[0] == together[row][0]
        assert alone[1] == pytest.approx(together[row][1], rel=1e-4)


def test_only_the_draft_vocabulary_and_the_sequences_own_tokens_are_drafted(chain: ChainHead, target: Target) -> None:
    """Every second token is in the vocabulary; the first sequence has all others beside it, the second none."""
    drafts = chain.draft(endings(target, chain, 40, [range(target.vocabulary), ()]), Reach(STEPS)).tokens

    assert any(token % 2 for tokens in drafts[::2] for token in tokens)
    assert not any(token % 2 for tokens in drafts[1::2] for token in tokens)


def test_a_draft_ends_before_a_token_that_is_not_worth_its_row(chain: ChainHead, target: Target) -> None:
    given = endings(target, chain, 20)
    whole, cut = (drafts_of(chain.draft(given, Reach(STEPS, row_price))) for row_price in (0.0, 0.02))

    for (tokens, sure), (kept, _) in zip(whole, cut, strict=True):
        survival = [math.prod(sure[: i + 1]) for i in range(len(sure))]
        assert kept == tokens[: sum(value >= 0.02 for value in survival)]
    assert 0 < sum(len(kept) for kept, _ in cut) < sum(len(tokens) for tokens, _ in whole)


def test_all_drafts_end_where_another_step_is_not_worth_it(chain: ChainHead, target: Target) -> None:
    given = endings(target, chain, 4)
    whole = drafts_of(chain.draft(given, Reach(STEPS)))
    promise = [sum(math.prod(sure[: place + 1]) for _, sure in whole) for place in range(STEPS)]
    price = (promise[0] + promise[1]) / 2

    cut = chain.draft(given, Reach(STEPS, 0.0, price))
    assert {len(tokens) for tokens in cut.tokens} == {2}
    assert cut.walked == 2
    assert chain.draft(given, Reach(STEPS, 1.0)).walked == 1, "the step in which all drafts end was walked, too"


def test_a_state_that_is_no_number_drafts_nothing(chain: ChainHead, target: Target) -> None:
    good, bad = endings(target, chain, 2)
    bad = replace(bad, state=torch.full_like(bad.state, float("nan")))

    drafts = chain.draft([good, bad], Reach(2, 1e-6))

    assert [len(tokens) for tokens in drafts.tokens] == [2, 0]


def test_a_drafter_asks_for_what_it_knows_and_cuts_to_each_limit(state_chain: ChainHead, target: Target) -> None:
    drafter = HeadDrafter(state_chain)
    for name in "abc":
        drafter.begin(Request(name, (1, 2, 3)))
    for name, state in zip("ab", states(target, 2), strict=True):
        drafter.observe(name, [4, 5], torch.stack([state, state]))

    drafts = drafter.propose({"a": 1, "b": 4, "c": 4})

    assert {name: len(draft.tokens) for name, draft in drafts.items()} == {"a": 1, "b": 4}
    assert all(len(draft.tokens) == len(draft.evidence) == len(draft.sources) for draft in drafts.values())


def test_a_drafter_prepares_a_prompts_own_tokens_once_and_tells_how_far_to_go(
    state_chain: ChainHead, target: Target
) -> None:
    asked: list[tuple[Sequence[Ending], Reach]] = []
    prepared: list[tuple[int, ...]] = []

    class Watching:
        def extras(self, tokens: Iterable[int]) -> tuple[int, ...]:
            prepared.append(tuple(tokens))
            return tuple(tokens)

        def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
            asked.append((endings, reach))
            return Drafts([(1,)] * len(endings), [(0.5,)] * len(endings), 1)

    ticks = itertools.count()
    drafter = HeadDrafter(Watching(), clock=lambda: float(next(ticks)))
    drafter.begin(Request("a", (1, 2, 3)))
    for _ in range(3):
        drafter.observe("a", [4], states(target, 1)[0][None])
        drafter.propose({"a": 4}, Stakes(token_seconds=10.0, row_seconds=2.0))

    assert prepared == [(1, 2, 3)]
    assert [endings[0].extras for endings, _ in asked] == [(1, 2, 3)] * 3
    assert {reach.row_price for _, reach in asked} == {0.2}
    assert [reach.step_price for _, reach in asked] == [0.0, 0.2, 0.2], "a step took a second, twice a tenth of a token"


def test_a_drafter_without_hidden_states_says_so(state_chain: ChainHead) -> None:
    drafter = HeadDrafter(state_chain)
    drafter.begin(Request("a", (1,)))
    with pytest.raises(ValueError, match="hidden states"):
        drafter.observe("a", [1], None)
