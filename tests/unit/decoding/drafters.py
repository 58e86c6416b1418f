"""Drafters for the tests: one that often knows the answer, and several that misbehave."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragspec.decoding.acceptance import Source
from ragspec.decoding.cache import SlotCache
from ragspec.decoding.draft import Draft, Evidence, Standing, Stretch
from ragspec.decoding.request import Request


class NoisyOracle:
    """Proposes the known answer, corrupted here and there and of any length, so that every way to accept occurs."""

    name = "noisy oracle"

    def __init__(
        self, answers: Mapping[str, Sequence[int]], vocabulary: int, *, noise: float = 0.2, seed: int = 0
    ) -> None:
        self._answers = answers
        self._vocabulary = vocabulary
        self._noise = noise
        self._random = random.Random(seed)
        self._written: dict[str, int] = {}

    def begin(self, request: Request) -> None:
        self._written[request.id] = 0

    def observe(self, request_id: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        self._written[request_id] += len(tokens)

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        drafts = {}
        for request_id, limit in limits.items():
            ahead = list(self._answers[request_id])[self._written[request_id] :]
            ahead += [self._random.randrange(self._vocabulary) for _ in range(3)]
            tokens = [
                self._random.randrange(self._vocabulary) if self._random.random() < self._noise else token
                for token in ahead[: self._random.randint(0, limit)]
            ]
            drafts[request_id] = Draft(tuple(tokens), (Source.HEAD,) * len(tokens))
        return drafts

    def end(self, request_id: str) -> None:
        self._written.pop(request_id, None)


class Quiet:
    """Proposes nothing; the misbehaving ones below change one method each."""

    name = "quiet"

    def begin(self, request: Request) -> None: ...

    def observe(self, request_id: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> None: ...

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        return {}

    def end(self, request_id: str) -> None: ...


class GoesOn(Quiet):
    """Proposes nothing of its own, but goes on behind what others draft: the last token again."""

    name = "goes on"

    def extend(self, request_id: str, tokens: Sequence[int], limit: int) -> Draft:
        return Draft((tokens[-1],) * limit, (Source.ANSWER,) * limit, (Evidence("extended", 0.9),) * limit)


class RaisesInPropose(Quiet):
    name = "raises in propose"

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        msg = "no draft today"
        raise RuntimeError(msg)


class RaisesInObserve(Quiet):
    name = "raises in observe"

    def observe(self, request_id: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        raise KeyError(request_id)

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        return {request_id: Draft((1,) * limit, (Source.HEAD,) * limit) for request_id, limit in limits.items()}


class RaisesInBeginAndEnd(Quiet):
    name = "raises in begin and end"

    def begin(self, request: Request) -> None:
        raise ValueError(request.id)

    def end(self, request_id: str) -> None:
        raise ValueError(request_id)


class Reads(Quiet):
    """Keeps what it is told of every sequence: by position the token behind it, and its features."""

    name = "reads"

    def __init__(self, *features: int) -> None:
        self.features = features
        self.told: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}
        self.standings: Mapping[str, Standing] = {}

    def slot_bytes(self, capacity: int) -> int:
        return 0

    def make_cache(self, slots: int, capacity: int) -> SlotCache:
        return SlotCache(slots=slots, capacity=capacity)

    def locate(self, standings: Mapping[str, Standing]) -> None:
        self.standings = standings

    def follow(self, stretches: Sequence[Stretch], features: torch.Tensor) -> None:
        rows = iter(features)
        for stretch in stretches:
            known = self.told.setdefault(stretch.request_id, {})
            for position, token in enumerate(stretch.following, stretch.start):
                known[position] = token, next(rows).clone()
        assert next(rows, None) is None


class RaisesInFollow(Reads):
    name = "raises in follow"

    def follow(self, stretches: Sequence[Stretch], features: torch.Tensor) -> None:
        raise RuntimeError(len(stretches))

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        msg = "it was asked all the same"
        raise SystemExit(msg)


class RaisesInLocate(RaisesInFollow):
    name = "raises in locate"

    def follow(self, stretches: Sequence[Stretch], features: torch.Tensor) -> None: ...

    def locate(self, standings: Mapping[str, Standing]) -> None:
        raise RuntimeError(len(standings))


class ProposesNonsense(Quiet):
    """Tokens outside the vocabulary, missing sources, too many tokens, unasked requests, bad evidence."""

    name = "proposes nonsense"

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        return {"nobody": self._nonsense(1)} | {name: self._nonsense(limit) for name, limit in limits.items()}

    def extend(self, request_id: str, tokens: Sequence[int], limit: int) -> Draft:
        del request_id, tokens
        return self._nonsense(limit)

    def _nonsense(self, limit: int) -> Any:
        return self._random.choice(
            [
                Draft((10**9,), (Source.HEAD,)),
                Draft((-1,), (Source.HEAD,)),
                Draft((1, 2), (Source.HEAD,)),
                Draft((1,) * (limit + 50), (Source.HEAD,) * (limit + 50)),
                Draft((1,), (Source.TARGET,)),
                Draft((1,), (99,)),
                Draft((1,), (Source.HEAD,), (Evidence("nonsense", 0.5),)),
                Draft((1,), (Source.HEAD,), (0.5,)),
                None,
            ]
        )


class NowAndThen(NoisyOracle):
    """Raises at random, in any of its methods."""

    name = "now and then"

    def __init__(self, answers: Mapping[str, Sequence[int]], vocabulary: int, seed: int) -> None:
        super().__init__(answers, vocabulary, seed=seed)
        self._dice = random.Random(seed)

    def begin(self, request: Request) -> None:
        self._maybe_raise()
        super().begin(request)

    def observe(self, request_id: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        super().observe(request_id, tokens, hidden)
        self._maybe_raise()

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        self._maybe_raise()
        return super().propose(limits)

    def extend(self, request_id: str, tokens: Sequence[int], limit: int) -> Draft:
        self._maybe_raise()
        return Draft((tokens[-1],) * limit, (Source.ANSWER,) * limit, (Evidence("extended", 0.9),) * limit)

    def _maybe_raise(self) -> None:
        if self._dice.random() < 0.05:
            msg = "bad luck"
            raise RuntimeError(msg)


class Register(Quiet):
    """Keeps who is in and what it was told of them."""

    name = "register"

    def __init__(self, *, wants_hidden: bool) -> None:
        self.wants_hidden = wants_hidden
        self.told: dict[str, list[int]] = {}
        self.consistent = True

    def begin(self, request: Request) -> None:
        self.told[request.id] = []

    def observe(self, request_id: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        self.told[request_id] += tokens
        # Who did not ask for states gets them where another drafter did.
        self.consistent &= not self.wants_hidden if hidden is None else len(hidden) == len(tokens)

    def end(self, request_id: str) -> None:
        self.told.pop(request_id, None)
