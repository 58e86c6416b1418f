"""Drafters whose time counts are asked where the others are unsure, for as long as that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import FREE_STAKES, Draft, Evidence, Stakes
from ragspec.decoding.drafting import DraftingPanel
from ragspec.decoding.request import Request
from ragspec.decoding.step_cost import FREE, StepCost, StepLoad
from ragspec.decoding.width import COSTLY_PAUSE, WidthController, _Thrift
from tests.unit.decoding import drafters
from tests.unit.decoding.test_width import cost


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
        return {name: Draft((7,), (Source.HEAD,), (self._evidence,)) for name in limits}


class Copies(drafters.Quiet):
    """Proposes a token to each request with the probability that stands in its name."""

    name = "copies"

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        return {name: Draft((5,), (Source.PASSAGE,), (Evidence(("copies", name), float(name)),)) for name in limits}


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
        return Draft((2,) * limit, (Source.PASSAGE,) * limit, (Evidence("behind", 0.9),) * limit)


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


def test_where_nobody_measured_costly_drafters_are_asked_as_well() -> None:
    costly = Costly(0.0)
    drafts = costly_controller(costly, ["0.2"], StepCost(FREE)).draft({"0.2": 4}, StepLoad(1))

    assert costly.asked == [({"0.2"}, FREE_STAKES)]
    assert drafts["0.2"].sources == (Source.HEAD,)
