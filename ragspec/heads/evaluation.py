"""A head in the engine: mean acceptance length and time of the head alone, of lookup alone, and of both."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Drafter
from ragspec.decoding.engine import Engine
from ragspec.decoding.feature_drafter import make_head_drafter
from ragspec.decoding.head_drafter import ChainHead, Drafts, Ending, Reach
from ragspec.decoding.lookup import JobDrafter, OwnTextDrafter
from ragspec.decoding.request import Completion, Request
from ragspec.decoding.step_cost import StepProfile
from ragspec.decoding.target import Target


class TimedChain:
    """A chain that counts its steps and their seconds; what an attention head takes to follow the target is not among them."""

    def __init__(self, chain: ChainHead) -> None:
        self._chain = chain
        self.steps = 0
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        """What else the chain has: layers, and a cache that it attends to."""
        return getattr(self._chain, name)

    def extras(self, tokens: Iterable[int]) -> Any:
        """As the chain makes them; their seconds count."""
        began = time.perf_counter()
        extras = self._chain.extras(tokens)
        self.seconds += time.perf_counter() - began
        return extras

    def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
        """As the chain drafts."""
        began = time.perf_counter()
        drafts = self._chain.draft(endings, reach)
        self.seconds += time.perf_counter() - began
        self.steps += drafts.walked
        return drafts


@dataclass
class Way:
    """What one way to draft did.

    Attributes:
        name: head, lookup or hybrid.
        tokens: emitted in verify steps.
        steps: verify steps.
        drafted: draft tokens.
        accepted: of these.
        seconds: decoding.
        tested: how often a draft had a token at each place.
        stood: how often that token was accepted.
        by_source: emitted tokens by who proposed them.
        draft_step_s: seconds of one step of the head's chain.
    """

    name: str
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    tested: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    by_source: dict[str, int] = field(default_factory=dict)
    draft_step_s: float = 0.0

    def add(self, done: Completion) -> None:
        """Count an answer."""
        record = done.acceptance
        self.tokens += done.completion_tokens - 1
        self.steps += record.num_verify_steps
        self.drafted += record.num_draft_tokens
        self.accepted += record.num_accepted_draft_tokens
        self.seconds += done.decode_s
        for drafted, accepted in zip(record.per_step_drafted, record.per_step_accepted, strict=True):
            while len(self.tested) < drafted:
                self.tested.append(0)
                self.stood.append(0)
            for place in range(min(drafted, accepted + 1)):
                self.tested[place] += 1
                self.stood[place] += place < accepted
        for source in record.token_sources:
            name = Source(source).name.lower()
            self.by_source[name] = self.by_source.get(name, 0) + 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verify step, bonus token included."""
        return self.tokens / max(1, self.steps)

    @property
    def by_place(self) -> list[float]:
        """Probability of acceptance at each place, given that all before stood."""
        return [stood / max(1, tested) for stood, tested in zip(self.stood, self.tested, strict=True)]

    def figures(self, prompts: str, target_step_s: float) -> dict[str, Any]:
        """What is printed and kept of it.

        Args:
            prompts: what the prompts are called.
            target_step_s: seconds of a step of the target without drafts.
        """
        return {
            "prompts": prompts,
            "drafts": self.name,
            "mean_acceptance_length": round(self.mean_acceptance_length, 3),
            "drafted_per_step": round(self.drafted / max(1, self.steps), 2),
            "draft_acceptance_rate": round(self.accepted / max(1, self.drafted), 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "acceptance_by_place": [round(rate, 2) for rate in self.by_place],
            "tokens_by_source": self.by_source,
            "draft_step_ms": round(self.draft_step_s * 1000, 3),
            "target_step_ms": round(target_step_s * 1000, 3),
        }


def compare(
    target: Target, chain: ChainHead, requests: Iterable[Request], profile: StepProfile, *, window: int, max_draft: int
) -> list[Way]:
    """Decode every request with each way to draft, one at a time, in turns.

    Args:
        target: the decoder.
        chain: the head.
        requests: prompts.
        profile: what steps take, by which drafts are cut.
        window: tokens of prompt and answer.
        max_draft: draft tokens of a step at most.
    """
    alone, beside = TimedChain(chain), TimedChain(chain)
    drafting: dict[str, list[Drafter]] = {
        "lookup": [OwnTextDrafter(), JobDrafter()],
        "head": [make_head_drafter(alone)],
        "hybrid": [OwnTextDrafter(), JobDrafter(), make_head_drafter(beside)],
    }
    engines = {
        name: Engine(
            target,
            max_batch=1,
            context_window=window,
            max_draft=max_draft,
            drafters=drafters,
            prefix_cache=0,
            step_profile=profile,
        )
        for name, drafters in drafting.items()
    }
    ways = {name: Way(name) for name in drafting}
    order = list(drafting)
    for number, request in enumerate(requests):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            engines[name].add(request)
            while engines[name].has_work:
                for done in engines[name].step():
                    ways[name].add(done)
    for name, timed in (("head", alone), ("hybrid", beside)):
        ways[name].draft_step_s = timed.seconds / max(1, timed.steps)
    return list(ways.values())
