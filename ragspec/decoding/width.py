"""How many draft tokens a step verifies: as many as make the whole batch faster, none included.

All draft tokens of a step compete, whosever they are: sorted by the probability that they survive, the k likeliest are
verified, with the k that gives most tokens a second,

    (sequences + sum of the k survival probabilities) / seconds of a step with k draft rows.

A draft token survives only together with those before it, so of each sequence the step takes a beginning of its
draft. The seconds come from a table measured at start (`ragspec.decoding.step_cost`). vLLM's adaptive verification
and TurboSpec (arXiv 2406.14066) choose alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from ragspec.decoding.acceptance_rates import AcceptanceRates
from ragspec.decoding.draft import FREE_STAKES, Draft, Stakes
from ragspec.decoding.drafting import DraftingPanel
from ragspec.decoding.hybrid import weigh_together
from ragspec.decoding.step_cost import StepCost, StepLoad

#: A draft must promise to make a step's tokens this much cheaper. Estimates err, and what they overrate is what is
#: chosen.
LEAST_GAIN = 1.01
#: Drafters that cost time are not asked where another draft's first token is as likely as this: what they would add there is
#: less than they take. Of 0.75, 0.5, 0.35 and 0.25 the last was fastest on rag, qa and summarization alike (docs/heads.md).
SURE = 0.25
#: A token pays where it survives with a probability of at least a row's seconds over a token's. What has not even a third of
#: that, with the row as cheap as rows get, is not looked at further.
LEAST_SHARE = 3.0
#: What is left of the running means of gain and price after another step, and the most steps in a row for which drafters rest.
#: Costly ones are judged by more steps: each time that they are tried in vain takes a tenth of one.
FADING, LONGEST_PAUSE = 0.8, 16
COSTLY_FADING, COSTLY_PAUSE = 0.95, 64


@dataclass(frozen=True, slots=True)
class Choice:
    """How much of each draft to verify.

    Attributes:
        widths: draft tokens by request; who gets none is left out.
        gain: seconds that this is expected to save.
        stakes: what one more token would win and cost.
    """

    widths: Mapping[str, int]
    gain: float
    stakes: Stakes


def choose_widths(survivals: Mapping[str, Sequence[float]], load: StepLoad, cost: StepCost) -> Choice:
    """How much of each draft to verify.

    Where prompt chunks ride along, a step costs more and its decode rows cost otherwise, but a token is worth what it
    was: what it costs in a step without them.

    Args:
        survivals: of each request's draft tokens, falling, in (0, 1). Of equals the earlier request's are taken.
        load: the step without drafts.
        cost: what steps take.
    """
    ranked = sorted(chain.from_iterable(survivals.values()), reverse=True)
    most = len(ranked) + load.sequences
    alone = cost.curve(load.without_prompts, most)
    seconds = cost.curve(load, most) if load.prompt_rows else alone
    emitted = list(accumulate(ranked, initial=float(load.sequences)))
    # Plain numbers: there are few of them, and arrays take longer to make than these to add.
    worth = min(spent / tokens for spent, tokens in zip(alone, emitted, strict=False))
    gains = [
        (tokens - emitted[0]) * worth - (spent - seconds[0]) for spent, tokens in zip(seconds, emitted, strict=False)
    ]
    gain = max(gains)
    width = gains.index(gain)
    if gain < (LEAST_GAIN - 1.0) * emitted[0] * worth:
        width = 0
    row = (seconds[width + load.sequences] - seconds[width]) / load.sequences
    return Choice(_taken(survivals, ranked, width), gains[width], Stakes(worth, row))


def _taken(survivals: Mapping[str, Sequence[float]], ranked: Sequence[float], width: int) -> dict[str, int]:
    """How many of each request's are among the `width` likeliest; of equals the earlier request's."""
    if not width:
        return {}
    least = ranked[width - 1]
    equals = width - ranked.index(least)
    widths = {}
    for request_id, values in survivals.items():
        count = 0
        for value in values:
            if value < least or (value == least and not equals):
                break
            equals -= value == least
            count += 1
        if count:
            widths[request_id] = count
    return widths


#: Drafts by request, each with its tokens' survival probabilities.
_Rated = dict[str, tuple[Draft, list[float]]]


class WidthController:
    """Between two forward passes: asks for drafts where they pay, rates them and cuts them to what the step should
    verify.

    Args:
        panel: the drafters.
        cost: what steps take.
        clock: seconds; for tests.
    """

    def __init__(self, panel: DraftingPanel, cost: StepCost, clock: Callable[[], float] = time.perf_counter) -> None:
        self._panel = panel
        self._cost = cost
        self._clock = clock
        self._rates = AcceptanceRates()
        self._thrift = _Thrift(FADING, LONGEST_PAUSE)
        self._costly_thrift = _Thrift(COSTLY_FADING, COSTLY_PAUSE)
        self._costly_from = 0  # sequences when costly drafters were last asked
        self._least = 0.0  # in this step, tokens that survive with less are not rated: they do not pay by far

    def draft(self, limits: Mapping[str, int], load: StepLoad) -> dict[str, Draft]:
        """The drafts to verify in a step; where nobody measured what steps take, the likeliest of each sequence, whole.

        Args:
            limits: most draft tokens of each decoding sequence that may speculate.
            load: the step without drafts.
        """
        if self._rates.turn(limits):
            self._thrift.forgive()
        if not self._cost.profiled:
            best = self._likeliest({}, self._panel.propose(limits))
            best = self._likeliest(best, self._panel.propose_costly(limits, FREE_STAKES))
            return {request_id: draft for request_id, (draft, _) in best.items()}
        return self._drafts(limits, load) if any(limits.values()) else {}

    def record(self, request_id: str, draft: Draft, accepted: int) -> None:
        """Learn from what a verify step tested; called for every sequence that decoded, with or without a draft."""
        self._rates.record(request_id, draft, accepted)

    def _drafts(self, limits: Mapping[str, int], load: StepLoad) -> dict[str, Draft]:
        best: _Rated = {}
        choice: Choice | None = None
        if 2 * load.sequences <= self._costly_from:  # what did not pay in a batch may pay in half of it
            self._costly_thrift.forgive()
        asking, asking_costly = self._thrift.allows(), self._panel.has_costly and self._costly_thrift.allows()
        if asking or asking_costly:
            self._least = _least_survival(load, sum(limits.values()), self._cost)
        if asking:
            began = self._clock()
            best = self._likeliest(best, self._panel.propose(limits))
            choice = self._choose(best, load)
            self._thrift.weigh(choice.gain, self._clock() - began)
        if asking_costly:
            self._costly_from = load.sequences
            began = self._clock()
            choice = choice or self._choose(best, load)
            unsure = {i: limit for i, limit in limits.items() if _first(best.get(i)) < SURE}
            if unsure:
                # Where the lookups rest, nothing is copied behind a head's draft either.
                best = self._weighed_together(
                    best, self._panel.propose_costly(unsure, choice.stakes), unsure if asking else {}
                )
                without, choice = choice, self._choose(best, load)
                self._costly_thrift.weigh(choice.gain - without.gain, self._clock() - began)
        if choice is None:
            return {}
        return {request_id: best[request_id][0].cut(width) for request_id, width in choice.widths.items()}

    def _choose(self, best: _Rated, load: StepLoad) -> Choice:
        return choose_widths({i: survival for i, (_, survival) in best.items()}, load, self._cost)

    def _rated(self, request_id: str, draft: Draft) -> tuple[Draft, list[float]]:
        return draft, self._rates.survival(request_id, draft, self._least)

    def _weighed_together(
        self, best: _Rated, proposed: Mapping[str, Sequence[Draft]], room: Mapping[str, int]
    ) -> _Rated:
        """The same where drafts come of sources that know nothing of each other: one may go on where the other ends.

        Args:
            best: the lookups' drafts.
            proposed: the head's.
            room: most tokens of a draft that a copy may go on behind, of each request.
        """
        chosen = dict(best)
        for request_id, drafts in proposed.items():
            offers: list[Draft] = []
            for drafted in drafts:
                copied, ahead = weigh_together(best[request_id][0] if request_id in best else Draft(), drafted)
                # A copy that begins like the head's draft is what would be copied behind it.
                if copied.tokens[: len(ahead.tokens)] != ahead.tokens:
                    ahead = self._panel.extended(request_id, ahead, room.get(request_id, 0))
                offers += (copied, ahead)
            rated = [self._rated(request_id, draft) for draft in offers]
            chosen[request_id] = max(rated, key=lambda pair: sum(pair[1]))
        return chosen

    def _likeliest(self, best: _Rated, proposed: Mapping[str, Sequence[Draft]]) -> _Rated:
        """Of each request's drafts the one that promises most, and its tokens' survival probabilities."""
        chosen = dict(best)
        for request_id, drafts in proposed.items():
            rated = [self._rated(request_id, draft) for draft in drafts]
            if request_id in best:
                rated.insert(0, best[request_id])
            chosen[request_id] = max(rated, key=lambda pair: sum(pair[1])) if len(rated) > 1 else rated[0]
        return chosen


def _least_survival(load: StepLoad, most: int, cost: StepCost) -> float:
    """The least survival probability with which a draft token of a step is looked at further.

    Args:
        load: the step without drafts.
        most: draft tokens that it may have, at least one.
        cost: what steps take.

    Returns:
        A row's seconds over a token's, with the row as cheap as rows get, over `LEAST_SHARE`; above 1 where none pays.
    """
    curve = cost.curve(load.without_prompts, most)
    row = min((seconds - curve[0]) / rows for rows, seconds in enumerate(curve[1 : most + 1], 1))
    return row * load.sequences / curve[0] / LEAST_SHARE


def _first(rated: tuple[Draft, list[float]] | None) -> float:
    """How likely a draft's first token is to be accepted; 0 where there is none that could pay."""
    return rated[1][0] if rated and rated[1] else 0.0


class _Thrift:
    """Whether to ask the drafters at all: where asking costs more than drafts save, they rest, each time for twice as
    long.

    Args:
        fading: what is left of the means after another step, in which they were asked or not: what they did long ago is
            forgotten while they rest.
        longest: steps of the longest rest.
    """

    def __init__(self, fading: float, longest: int) -> None:
        self._fading = fading
        self._longest = longest
        self._gain = 0.0
        self._price = 0.0
        self._pause = 0
        self._resting = 0
        self._rested = 0  # steps since they were last asked
        self._weighed = False

    def allows(self) -> bool:
        """Whether to ask in this step."""
        if self._resting:
            self._resting -= 1
            self._rested += 1
            return False
        return True

    def weigh(self, gain: float, price: float) -> None:
        """Note the seconds that a step's drafts are expected to save, and those that they took."""
        if self._rested:  # what was left undone meanwhile is not the price of this step
            price = min(price, self._price)
        left = self._fading ** (1 + self._rested) if self._weighed else 0.0
        self._weighed, self._rested = True, 0
        self._gain += (1 - left) * (gain - self._gain)
        self._price += (1 - left) * (price - self._price)
        self._pause = 0 if self._gain >= self._price else min(2 * self._pause + 1, self._longest)
        self._resting = self._pause

    def forgive(self) -> None:
        """Something is new, a sequence or the size of the batch: ask again."""
        self._gain = max(self._gain, self._price)
        self._pause = self._resting = 0
