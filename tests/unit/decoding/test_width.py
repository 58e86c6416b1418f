"""A step verifies as many draft tokens as make the batch faster, whoever drafted them, and none where none do."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import FREE_STAKES, Draft, Evidence, Stakes
from ragspec.decoding.drafting import DraftingPanel
from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.step_cost import FREE, StepCost, StepLoad, StepProfile
from ragspec.decoding.width import (
    COSTLY_PAUSE,
    LONGEST_PAUSE,
    WidthController,
    _least_survival,
    _taken,
    _Thrift,
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
            request_id: Draft((1,) * limit, (Source.HEAD,) * limit, None, (self._evidence,) * limit)
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


class Costly(drafters.Quiet):
    """Drafts one likely token for whoever it is asked for, and takes its time on a clock of its own."""

    name = "costly"
    costly = True

    def __init__(self, seconds: float, prior: float = 0.9) -> None:
        self.now = 0.0
        self.asked: list[tuple[set[str], Stakes]] = []
        self._seconds = seconds
        self._evidence = Evidence("costly", prior)

    def propose(self, limits: Mapping[str, int], stakes: Stakes = FREE_STAKES) -> Mapping[str, Draft]:
        self.asked.append((set(limits), stakes))
        self.now += self._seconds
        return {name: Draft((7,), (Source.HEAD,), None, (self._evidence,)) for name in limits}


class Copies(drafters.Quiet):
    """Proposes a token to each request with the probability that stands in its name."""

    name = "copies"

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        return {
            name: Draft((5,), (Source.PASSAGE,), None, (Evidence(("copies", name), float(name)),)) for name in limits
        }


def costly_controller(costly: Costly, requests: list[str], costs: StepCost) -> WidthController:
    panel = DraftingPanel([Copies(), costly], 40)
    for name in requests:
        panel.begin(Request(name, (1,)))
    return WidthController(panel, costs, clock=lambda: costly.now)


def test_a_costly_drafter_is_asked_only_where_the_others_are_unsure() -> None:
    costly = Costly(0.0)
    names = ["0.1", "0.2", "0.9"]
    drafts = costly_controller(costly, names, cost(1.0, 0.01)).draft(dict.fromkeys(names, 4), StepLoad(3))

    ((asked, _),) = costly.asked
    assert asked == {"0.1", "0.2"}
    assert {name: draft.sources[0] for name, draft in drafts.items()} == {
        "0.1": Source.HEAD,
        "0.2": Source.HEAD,
        "0.9": Source.PASSAGE,
    }


def test_a_costly_drafter_is_told_what_a_token_wins_and_a_row_costs() -> None:
    """A step of two sequences takes a second, a row a hundredth: a token is worth half a second, or less with drafts."""
    costly = Costly(0.0)
    costly_controller(costly, ["0.2", "0.1"], cost(1.0, 0.01)).draft({"0.2": 4, "0.1": 4}, StepLoad(2))

    ((_, stakes),) = costly.asked
    assert 0.35 < stakes.token_seconds < 0.5
    assert stakes.row_seconds == pytest.approx(0.01)


@pytest.mark.parametrize(("seconds", "often"), [(0.01, True), (5.0, False)])
def test_a_costly_drafter_rests_where_it_takes_more_than_it_saves(seconds: float, *, often: bool) -> None:
    """Although a new sequence enters in every step, as in a large batch; in half the batch it is tried again."""
    costly = Costly(seconds)
    panel = DraftingPanel([costly], 40)
    width = WidthController(panel, cost(1.0, 0.01), clock=lambda: costly.now)
    steps = 600
    for step in range(steps):
        running = [str(step + i) for i in range(8)]
        for name in running:
            panel.begin(Request(name, (1,)))
        width.draft(dict.fromkeys(running, 4), StepLoad(8))
    assert (len(costly.asked) == steps) == often
    if not often:
        assert steps // (COSTLY_PAUSE + 1) <= len(costly.asked) < steps // COSTLY_PAUSE + 8
        before = len(costly.asked)
        width.draft({"66": 4}, StepLoad(4))
        assert len(costly.asked) == before + 1


def test_a_costly_drafter_that_pays_again_is_soon_asked_again() -> None:
    """However long it did not, in a batch that stays as it is."""
    costly = Costly(5.0)
    chooser = costly_controller(costly, ["0.2"], cost(1.0, 0.01))
    for _ in range(500):
        chooser.draft({"0.2": 4}, StepLoad(1))
    assert len(costly.asked) < 20

    costly._seconds = 0.01
    before = len(costly.asked)
    for _ in range(2 * COSTLY_PAUSE):
        chooser.draft({"0.2": 4}, StepLoad(1))

    assert len(costly.asked) - before > COSTLY_PAUSE // 2


def test_a_costly_drafter_is_asked_where_no_token_of_the_others_could_pay() -> None:
    """Rows are as dear as half a token here, so a copy that stands once in a hundred is not even looked at."""
    costly = Costly(0.0)
    drafts = costly_controller(costly, ["0.01"], cost(1.0, 0.5)).draft({"0.01": 4}, StepLoad(1))

    assert [asked for asked, _ in costly.asked] == [{"0.01"}]
    assert drafts["0.01"].sources == (Source.HEAD,)


def test_of_equally_likely_tokens_the_earlier_requests_are_taken() -> None:
    """Earlier in the step, whatever their names."""
    survivals, ranked = dict.fromkeys("zay", (0.5, 0.25)), [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]

    assert _taken(survivals, ranked, 2) == {"z": 1, "a": 1}
    assert _taken(survivals, ranked, 4) == {"z": 2, "a": 1, "y": 1}


def test_a_dear_first_row_hides_no_cheap_ones_behind_it() -> None:
    """Steps take 1 without drafts, 1.9 with a row and hardly more with ten: what stands seldom, but then as a whole, pays."""
    costs = StepCost(StepProfile((1,), (1, 2, 11), ((1.0, 1.9, 1.95),), 0, 0.0, (8, 16), (1.0, 1.0)))
    whole = Draft((1,) * 10, (Source.HEAD,) * 10, None, (Evidence("first", 0.25), *[Evidence("other", 0.99)] * 9))

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


def test_what_was_left_undone_while_drafters_rested_is_not_their_price() -> None:
    thrift = _Thrift(0.8, 16)
    thrift.weigh(0.0, 1.0)
    assert [thrift.allows(), thrift.allows()] == [False, True]

    thrift.weigh(5.0, 50.0)

    assert thrift.allows(), "at 1 it pays, at 50 it would not"


class Extends(drafters.Quiet):
    """Copies nothing by itself; behind another's draft it goes on with twos."""

    name = "extends"

    def extend(self, request_id: str, tokens: Sequence[int], limit: int) -> Draft:
        assert request_id == "0.2"
        return Draft((2,) * limit, (Source.PASSAGE,) * limit, None, (Evidence("behind", 0.9),) * limit)


def test_a_copy_goes_on_where_a_costly_draft_ends() -> None:
    """Each token with its own source and evidence, and both together no longer than may be."""
    panel = DraftingPanel([Extends(), Costly(0.0)], 40)
    panel.begin(Request("0.2", (1,)))

    drafts = WidthController(panel, cost(1.0, 0.001), clock=lambda: 0.0).draft({"0.2": 7}, StepLoad(1))

    ahead = drafts["0.2"].sources.count(Source.HEAD)
    assert 0 < ahead < 7
    assert drafts["0.2"].sources == (Source.HEAD,) * ahead + (Source.PASSAGE,) * (7 - ahead)
    assert [evidence.kind for evidence in drafts["0.2"].evidence[ahead:]] == ["behind"] * (7 - ahead)


def test_a_copy_that_agrees_with_a_costly_draft_is_not_copied_behind_it_again() -> None:
    class Agrees(Copies):
        def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
            return {name: replace(draft, tokens=(7,)) for name, draft in super().propose(limits).items()}

        def extend(self, request_id: str, tokens: Sequence[int], limit: int) -> Draft:
            raise AssertionError((request_id, tokens, limit))

    costly = Costly(0.0)
    panel = DraftingPanel([Agrees(), costly], 40)
    panel.begin(Request("0.2", (1,)))
    WidthController(panel, cost(1.0, 0.001), clock=lambda: 0.0).draft({"0.2": 4}, StepLoad(1))

    assert len(costly.asked) == 1
    assert panel.failures == 0


def test_nobody_is_asked_where_no_token_may_be_drafted() -> None:
    """As at the last token of every answer."""
    drafter = Always()
    chooser = controller(drafter, costs=cost(1.0, 0.1))

    assert chooser.draft({"r": 0, "s": 0}, StepLoad(2)) == {}
    assert drafter.asked == 0
    assert chooser.draft({"r": 0, "s": 2}, StepLoad(2)).keys() == {"s"}


def test_where_nobody_measured_costly_drafters_are_asked_as_well() -> None:
    costly = Costly(0.0)
    drafts = costly_controller(costly, ["0.2"], StepCost(FREE)).draft({"0.2": 4}, StepLoad(1))

    assert costly.asked == [({"0.2"}, FREE_STAKES)]
    assert drafts["0.2"].sources == (Source.HEAD,)
