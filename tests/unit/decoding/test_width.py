"""A step verifies as many draft tokens as make the batch faster, whoever drafted them, and none where none do."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Mapping
from itertools import accumulate

import pytest

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft, Evidence
from ragspec.decoding.drafting import DraftingPanel
from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.step_cost import FREE, StepCost, StepLoad, StepProfile
from ragspec.decoding.width import (
    LONGEST_PAUSE,
    WidthController,
    _least_survival,
    _taken,
    choose_widths,
)
from tests import tiny
from tests.unit.decoding import drafters
from tests.unit.decoding.test_greedy_exactness import make_requests, run


def cost(first: float, row: float, chunk_row: float = 0.0) -> StepCost:
    """A step takes `first`, and `row` more for each draft row, whatever the batch; `chunk_row` more beside a long chunk."""
    decode = ((first, first + row), (first, first + 64 * row))
    return StepCost(StepProfile((1, 64), (1, 2), decode, 0, 0.0, (1, 50, 51), (1.0, 1.0, 1.0 + chunk_row)))


def widths(survivals: Mapping[str, list[float]], load: StepLoad, costs: StepCost) -> dict[str, int]:
    return dict(choose_widths(survivals, load, costs).widths)


def test_free_rows_are_all_taken() -> None:
    assert widths({"a": [0.5, 0.1], "b": [0.01]}, StepLoad(2), StepCost(FREE)) == {"a": 2, "b": 1}


def test_rows_as_dear_as_a_step_are_not_taken() -> None:
    assert widths({"a": [0.9, 0.8]}, StepLoad(1), cost(1.0, 1.0)) == {}


def test_tokens_of_all_sequences_compete() -> None:
    """A row costs a twentieth of a step that emits 2 tokens: it must bring more than 0.1, and rather more with others taken."""
    survivals = {"likely": [0.9, 0.8, 0.7, 0.05], "unlikely": [0.08, 0.07]}

    assert widths(survivals, StepLoad(2), cost(1.0, 0.05)) == {"likely": 3}


def test_the_choice_is_the_best_of_all_choices() -> None:
    """Against trying every width of every sequence."""
    rng = random.Random(3)
    for _ in range(200):
        count = rng.randint(1, 3)
        costs = cost(1.0, rng.choice([0.01, 0.05, 0.1, 0.3]))
        load = StepLoad(count)
        survivals: dict[str, list[float]] = {}
        for name in range(count):
            values = itertools.accumulate(
                [rng.uniform(0.05, 0.99) for _ in range(rng.randint(0, 3))], lambda a, b: a * b
            )
            survivals[str(name)] = list(values)

        def rate(
            chosen: Mapping[str, int],
            survivals: Mapping[str, list[float]] = survivals,
            costs: StepCost = costs,
            load: StepLoad = load,
        ) -> float:
            emitted = load.sequences + sum(sum(survivals[name][:width]) for name, width in chosen.items())
            return emitted / float(costs.seconds(load, sum(chosen.values()))[-1])

        every = itertools.product(*(range(len(values) + 1) for values in survivals.values()))
        best = max(rate(dict(zip(survivals, widths, strict=True))) for widths in every)
        plain = rate({})
        assert rate(widths(survivals, load, costs)) == pytest.approx(max(best, plain), rel=0.011)


def test_beside_a_prompt_chunk_rows_are_taken_by_what_they_cost_there() -> None:
    survivals = {"a": [0.6]}
    dear, free = cost(1.0, 0.0, chunk_row=0.9), cost(1.0, 0.0, chunk_row=0.1)

    assert widths(survivals, StepLoad(1, prompt_rows=100), dear) == {}
    assert widths(survivals, StepLoad(1, prompt_rows=100), free) == {"a": 1}
    assert widths(survivals, StepLoad(1), dear) == {"a": 1}


class Always(drafters.Quiet):
    """Drafts the same evidence to the limit, and counts how often it was asked."""

    name = "always"

    def __init__(self, prior: float = 0.5, kind: str = "always") -> None:
        self.asked = 0
        self._evidence = Evidence(kind, prior)

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        self.asked += 1
        return {
            request_id: Draft((1,) * limit, (Source.HEAD,) * limit, (self._evidence,) * limit)
            for request_id, limit in limits.items()
        }


class Proposes(drafters.Quiet):
    """Drafts the same for everybody."""

    name = "proposes"

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        return {request_id: self._draft.cut(limit) for request_id, limit in limits.items()}


def controller(*panel: drafters.Quiet, costs: StepCost, clock: itertools.count[int] | None = None) -> WidthController:
    """One that knows a request `r`; its clock stands still, or counts its readings."""
    drafting = DraftingPanel(panel, 10)
    for name in ("r", "s"):
        drafting.begin(Request(name, (1,)))
    return WidthController(drafting, costs, (lambda: 0.0) if clock is None else lambda: float(next(clock)))


def test_the_likeliest_of_several_drafts_is_taken() -> None:
    weak, strong = Always(0.2, "weak"), Always(0.8, "strong")

    for panel in ((weak, strong), (strong, weak)):
        drafts = controller(*panel, costs=StepCost(FREE)).draft({"r": 3}, StepLoad(1))
        assert [evidence.kind for evidence in drafts["r"].evidence] == ["strong"] * 3


def test_drafts_that_never_stand_are_given_up_and_tried_again_by_and_by() -> None:
    chooser = controller(Always(), costs=cost(1.0, 0.1))
    drafted = []
    for _ in range(3000):
        draft = chooser.draft({"r": 3}, StepLoad(1)).get("r", Draft())
        chooser.record("r", draft, 0)
        drafted.append(len(draft.tokens))

    assert drafted[0] > 0
    assert sum(drafted[100:]) < 290, "one row in ten steps at most"
    assert sum(drafted[1000:]) > 0


def test_drafters_rest_where_asking_costs_more_than_drafts_save() -> None:
    """And are asked again when a sequence is new."""
    drafter = Always(0.5)
    chooser = controller(drafter, costs=cost(1e-3, 1e-3), clock=itertools.count())
    for _ in range(400):
        chooser.record("r", chooser.draft({"r": 3}, StepLoad(1)).get("r", Draft()), 0)
    asked = drafter.asked

    assert 400 / (LONGEST_PAUSE + 1) <= asked < 60
    chooser.draft({"r": 3, "s": 3}, StepLoad(2))
    assert drafter.asked == asked + 1


def test_without_a_profile_every_draft_is_verified_whole() -> None:
    """However unlikely it is, however often drafts fell, and whatever asking takes."""
    chooser = controller(Always(0.001), costs=StepCost(FREE), clock=itertools.count())
    for _ in range(200):
        draft = chooser.draft({"r": 3}, StepLoad(1))["r"]
        chooser.record("r", draft, 0)

        assert len(draft.tokens) == 3


@pytest.mark.parametrize("row", [0.0, 0.02, 0.3, 5.0])
def test_answers_do_not_depend_on_what_rows_cost(row: float) -> None:
    target = tiny.target()
    requests = make_requests(30, seed=21)
    expected = {r.id: tiny.generate(target, r) for r in requests}
    oracle = drafters.NoisyOracle(expected, target.vocabulary)
    profile = StepProfile((1, 5), (1, 2), ((1.0, 1.0 + row), (1.0, 1.0 + 5 * row)), 0, 0.0, (1, 2), (1.0, 1.0))
    engine = Engine(target, max_batch=5, prefill_chunk=40, drafters=[oracle], step_profile=profile)

    done = run(engine, requests)

    assert {i: c.acceptance.token_ids for i, c in done.items()} == expected


def test_sequences_without_speculation_are_never_given_drafts_by_the_others() -> None:
    target = tiny.target()
    prompt = tuple(range(10, 40))
    requests = [
        Request("with", prompt, Sampling(max_tokens=20)),
        Request("without", prompt, Sampling(max_tokens=20, speculation=False)),
    ]
    answer = tiny.generate(target, requests[0])
    oracle = drafters.NoisyOracle(dict.fromkeys(("with", "without"), answer), target.vocabulary)
    engine = Engine(target, max_batch=2, drafters=[oracle])

    done = run(engine, requests)

    assert done["without"].acceptance.num_draft_tokens == 0
    assert done["with"].acceptance.num_draft_tokens > 0
    assert done["with"].acceptance.token_ids == done["without"].acceptance.token_ids


def test_of_equally_likely_tokens_the_earlier_requests_are_taken() -> None:
    """Earlier in the step, whatever their names."""
    survivals, ranked = dict.fromkeys("zay", (0.5, 0.25)), [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]

    assert _taken(survivals, ranked, 2) == {"z": 1, "a": 1}
    assert _taken(survivals, ranked, 4) == {"z": 2, "a": 1, "y": 1}


def test_a_dear_first_row_hides_no_cheap_ones_behind_it() -> None:
    """Steps take 1 without drafts, 1.9 with a row and hardly more with ten: what stands seldom, but then as a whole, pays."""
    costs = StepCost(StepProfile((1,), (1, 2, 11), ((1.0, 1.9, 1.95),), 0, 0.0, (8, 16), (1.0, 1.0)))
    whole = Draft((1,) * 10, (Source.HEAD,) * 10, (Evidence("first", 0.25), *[Evidence("other", 0.99)] * 9))

    drafts = controller(Proposes(whole), costs=costs).draft({"r": 10}, StepLoad(1))

    assert len(drafts["r"].tokens) == 10


def test_tokens_that_are_not_looked_at_would_have_gained_next_to_nothing() -> None:
    """Over steps of all shapes, and most tokens of dear rows are not."""
    rng = random.Random(0)
    looked_at = ranked = 0
    for _ in range(2000):
        sequences, rows = rng.choice([1, 3, 8, 16, 32]), 8
        middle = 1.0 + rng.choice([0.02, 0.3, 1.0]) * rng.random() * sequences
        costs = StepCost(
            StepProfile(
                (sequences,),
                (1, 4, rows + 1),
                ((1.0, middle, middle * (1 + rng.random())),),
                0,
                0.0,
                (8, 16),
                (1.0, 1.0),
            )
        )
        chances = {
            name: [rng.random() ** rng.choice([0.2, 1.0, 3.0]) for _ in range(rows)]
            for name in map(str, range(sequences))
        }
        survivals = {name: list(accumulate(values, operator.mul)) for name, values in chances.items()}
        load = StepLoad(sequences)
        least = _least_survival(load, sequences * rows, costs)
        kept = {name: [value for value in values if value >= least] for name, values in survivals.items()}
        ranked += sequences * rows
        looked_at += sum(map(len, kept.values()))

        best, found = choose_widths(survivals, load, costs), choose_widths(kept, load, costs)

        assert best.gain - found.gain <= 0.01
    assert looked_at < ranked // 2


def test_nobody_is_asked_where_no_token_may_be_drafted() -> None:
    """As at the last token of every answer."""
    drafter = Always()
    chooser = controller(drafter, costs=cost(1.0, 0.1))

    assert chooser.draft({"r": 0, "s": 0}, StepLoad(2)) == {}
    assert drafter.asked == 0
    assert chooser.draft({"r": 0, "s": 2}, StepLoad(2)).keys() == {"s"}
