"""Running estimates of how likely a draft token is to be accepted, by kind of evidence and by sequence.

A kind's estimate is its accepted count over its tested count, both begun with a prior and fading, so that it follows
the work at hand. A sequence has one factor on the odds of all its tokens: how much better or worse than estimated its
drafts have fared of late. Both fade back to where they began while nothing is tested: what was given up is tried
again by and by, and a change of the text is noticed. None of this decides which tokens are emitted, only how many are
tested.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft, Evidence

#: Tokens that a prior weighs.
PRIOR_WEIGHT = 40.0
#: Steps after which a kind's counts weigh half. Long: kinds are shared by all sequences and their texts are alike.
KIND_HALF_LIFE = 2000
#: Steps between two fadings of all kinds; they are few, but need not be touched in every step.
FADE_EVERY = 50
#: Tokens, accepted or expected to be, that a sequence's factor of 1 weighs at its beginning.
SEQUENCE_WEIGHT = 8.0
#: What is left of a sequence's counts after a step.
SEQUENCE_FADING = 0.9
#: Probability that drafters get for a token of which they say nothing.
UNKNOWN = 0.5
#: Bounds of an estimate: nothing is certain.
LOWEST, HIGHEST = 0.001, 0.995


@dataclass(slots=True)
class _Kind:
    prior: float
    accepted: float = 0.0
    tested: float = 0.0
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.estimate()

    def estimate(self) -> None:
        rate = (self.accepted + PRIOR_WEIGHT * self.prior) / (self.tested + PRIOR_WEIGHT)
        self.rate = min(max(rate, LOWEST), HIGHEST)


@dataclass(slots=True)
class _Fortune:
    """How a sequence's drafts have fared of late."""

    accepted: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        """On the odds that the kinds give."""
        return (self.accepted + SEQUENCE_WEIGHT) / (self.expected + SEQUENCE_WEIGHT)


class AcceptanceRates:
    """Counts of tested draft tokens, and what they say of the next."""

    def __init__(self) -> None:
        self._kinds: dict[Evidence, _Kind] = {}
        self._fortunes: dict[str, _Fortune] = {}
        self._steps = 0

    def survival(self, request_id: str, draft: Draft, least: float = 0.0) -> list[float]:
        """The probability of each draft token that it and all before it are accepted: falling, [k], or as far as `least`."""
        factor = self._fortunes[request_id].factor
        surviving = 1.0
        out = []
        for evidence in draft.evidence or _unknown(draft):
            kind = self._kinds.get(evidence)
            odds = evidence.prior if kind is None else kind.rate
            surviving *= odds * factor / (1.0 - odds + odds * factor)
            if surviving < least:
                break
            out.append(surviving)
        return out

    def record(self, request_id: str, draft: Draft, accepted: int) -> None:
        """Count what a verify step tested: the accepted draft tokens and the first that fell. Those behind it say
        nothing.

        An empty draft is recorded too: it is a step in which nothing was learnt.
        """
        fortune = self._fortunes.get(request_id)
        if fortune is None:  # it does not speculate
            return
        fortune.accepted *= SEQUENCE_FADING
        fortune.expected *= SEQUENCE_FADING
        for place, evidence in enumerate((draft.evidence or _unknown(draft))[: accepted + 1]):
            kind = self._kinds.get(evidence)
            if kind is None:
                kind = self._kinds[evidence] = _Kind(evidence.prior)
            fortune.expected += kind.rate
            kind.tested += 1.0
            if place < accepted:
                fortune.accepted += 1.0
                kind.accepted += 1.0
            kind.estimate()

    def turn(self, request_ids: Collection[str]) -> bool:
        """A new step: counts fade, and every sequence but these is forgotten. Whether one of them is new."""
        self._steps += 1
        if self._steps % FADE_EVERY == 0:
            left = 0.5 ** (FADE_EVERY / KIND_HALF_LIFE)
            for kind in self._kinds.values():
                kind.accepted *= left
                kind.tested *= left
                kind.estimate()
        for request_id in [known for known in self._fortunes if known not in request_ids]:
            del self._fortunes[request_id]
        new = [request_id for request_id in request_ids if request_id not in self._fortunes]
        for request_id in new:
            self._fortunes[request_id] = _Fortune()
        return bool(new)


def _unknown(draft: Draft) -> tuple[Evidence, ...]:
    """Evidence of a draft whose drafter gives none: who it came from and how far in it stands."""
    return tuple(_UNKNOWN[source, min(place, _FAR)] for place, source in enumerate(draft.sources))


_FAR = 3
_UNKNOWN = {
    (source, place): Evidence(("unknown", source, place), UNKNOWN) for source in Source for place in range(_FAR + 1)
}
