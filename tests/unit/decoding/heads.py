"""Heads for tests: of random weights, one that knows the answers, and one that raises."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ragspec.decoding.head_drafter import ChainHead, Drafts, Ending, Reach
from ragspec.decoding.target import Target
from ragspec.heads.architecture import Head, make_head
from ragspec.heads.loading import make_chain
from ragspec.heads.shape import AttentionShape, HeadShape

STATE_ARCHITECTURES = ["mlp", "recurrent"]
ARCHITECTURES = [*STATE_ARCHITECTURES, "attention"]


def random_head(target: Target, architecture: str, *, inner: int = 64, every: int = 2) -> Head:
    """A head whose weights nobody trained; its draft vocabulary is every second token, say."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        attention = AttentionShape(heads=4, key_heads=2, head_dim=8, width=target.hidden_size, layers=(0, 1, 2))
        shape = HeadShape(
            target.hidden_size,
            inner,
            tuple(range(0, target.vocabulary, every)),
            depth=3,
            attention=attention if architecture == "attention" else None,
        )
        return make_head(architecture, shape).requires_grad_(requires_grad=False)


_CHAINS: dict[tuple[str, str], ChainHead] = {}


def random_chain(target: Target, architecture: str) -> ChainHead:
    """The same, ready to draft; made once for each target."""
    key = (target.identity, architecture)
    if key not in _CHAINS:
        _CHAINS[key] = make_chain(random_head(target, architecture), target)
    return _CHAINS[key]


class KnowingChain:
    """Goes on as some known text goes on behind the last token, mostly, and is as sure of it as the dice say."""

    def __init__(self, texts: Iterable[Sequence[int]], seed: int) -> None:
        self._random = random.Random(seed)
        self._follow: dict[int, list[int]] = {}
        for text in texts:
            for token, following in pairwise(text):
                self._follow.setdefault(token, []).append(following)

    def extras(self, tokens: Iterable[int]) -> None:
        del tokens

    def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
        drafts = []
        for ending in endings:
            found: list[int] = []
            while len(found) < reach.steps and (ways := self._follow.get(found[-1] if found else ending.token)):
                found.append(self._random.choice(ways))
            drafts.append(tuple(found))
        return Drafts(drafts, [tuple(self._random.random() for _ in found) for found in drafts], max(1, reach.steps))


class RaisingChain:
    """A chain that breaks now and then."""

    def __init__(self, chain: ChainHead, seed: int) -> None:
        self._chain = chain
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    def extend(self, *given: Any) -> torch.Tensor:
        self._maybe_raise()
        return self._chain.extend(*given)

    def draft(self, endings: Sequence[Ending], reach: Reach) -> Drafts:
        self._maybe_raise()
        return self._chain.draft(endings, reach)

    def _maybe_raise(self) -> None:
        if self._random.random() < 0.1:
            msg = "the head broke"
            raise RuntimeError(msg)
