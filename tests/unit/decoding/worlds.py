"""What random schedules are drawn from: a target, and prompts whose answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from tests import tiny
from tests.unit.decoding.plain import Answer, PlainDecoder, Tokens

#: Tokens of the longest answer that a prompt of a conversation takes in.
LONGEST_TURN = 16


@dataclass(frozen=True)
class World:
    """A target and requests whose answers are known.

    Attributes:
        target: what decodes.
        families: prompts that share beginnings; the last of each continues the answer to its first.
        answers: of each prompt, ways to continue it and what the target alone writes then.
        windows: context windows that schedules have.
        tolerance: how far a log-probability may lie from the known one.
    """

    target: Target
    families: Sequence[Sequence[Tokens]]
    answers: Mapping[Tokens, Sequence[tuple[Sampling, Answer]]]
    windows: tuple[int, ...]
    tolerance: float


@dataclass(frozen=True)
class _Size:
    """Of a world: families of prompts, requests for each prompt, tokens of a prompt, and lengths that prefixes often have."""

    families: int
    requests: int
    longest: int
    edges: tuple[int, ...]
    windows: tuple[int, ...]


@lru_cache
def world(name: str = "smallest", kernels: Path | None = None) -> World:
    """The smallest model, one of a family's shape whose prompts outgrow its sliding window, or one in 8 bits (`int8`).

    Args:
        name: which.
        kernels: folder for the int8 kernels.
    """
    if name == "int8":
        # Prompts and answers cross the edge of the cache's first block, prefixes end about it.
        size = _Size(families=6, requests=7, longest=80, edges=(63, 64, 65, 66), windows=(192, 128, 96))
        target = tiny.int8(kernels)
        return _make_world(size, target, lambda *asked: _alone(target, *asked), tolerance=0.0)
    if name == "smallest":
        size = _Size(families=13, requests=17, longest=24, edges=(15, 16, 17), windows=(64, 64, 64, 28, 18))
        target = tiny.smallest()
    else:
        size = _Size(families=4, requests=5, longest=60, edges=(24,), windows=(128, 64))
        target = tiny.target(name)
    return _make_world(size, target, PlainDecoder(target).answer, tolerance=1e-3)


def _alone(target: Target, prompt: Tokens, sampling: Sampling) -> Answer:
    """What a target writes that takes its tokens one by one, in a cache where nothing was before.

    The kernels' numbers are compared with the model's elsewhere; here they are compared with themselves, bit for bit.
    """
    engine = Engine(target, max_batch=1, max_draft=0, prefix_cache=0, prefill_chunk=1)
    engine.add(Request("alone", prompt, sampling))
    done = None
    while done is None:
        done = next(iter(engine.step()), None)
    record = done.acceptance
    return Answer(record.token_ids, record.token_logprobs, done.text, done.finish_reason, certain=True)


def _make_world(
    size: _Size, target: Target, answer: Callable[[Tokens, Sampling], Answer], *, tolerance: float
) -> World:
    rng = random.Random(1)
    letters = target.vocabulary - 2
    families, answers = [], {}
    for _ in range(size.families):
        family = _draw_family(
            rng, size, letters, lambda prompt: answer(prompt, Sampling(max_tokens=LONGEST_TURN)).tokens
        )
        families.append(family)
        for prompt in family:
            free = answer(prompt, Sampling(max_tokens=LONGEST_TURN)).text
            known: list[tuple[Sampling, Answer]] = []
            while len(known) < size.requests:
                sampling = _draw_sampling(rng, free, target)
                written = answer(prompt, sampling)
                # Where a choice is within rounding, another processor may rightly write something else.
                if written.certain:
                    known.append((sampling, written))
            answers[prompt] = known
    return World(target, families, answers, size.windows, tolerance)


def _draw_family(rng: random.Random, size: _Size, letters: int, write: Callable[[Tokens], Tokens]) -> list[Tokens]:
    """Two prompts with the same beginning and the next turn of the first; each ends at random, or repeats a phrase."""
    edge = rng.choice([*size.edges, rng.randrange(size.longest)])
    begin = [rng.randrange(letters) for _ in range(min(edge, size.longest - 1))]
    family = []
    for _ in range(2):
        phrase = [rng.randrange(letters) for _ in range(rng.choice([1, 2, 3, 5, size.longest]))]
        family.append((*begin, *(phrase * size.longest)[: rng.randint(1, size.longest - len(begin))]))
    question = [rng.randrange(letters) for _ in range(rng.randint(1, 5))]
    return [*family, (*family[0], *write(family[0]), *question)]


def _draw_sampling(rng: random.Random, free: str, target: Target) -> Sampling:
    """Any mixture of options; stop strings are such as the answer may hold."""
    sampling = Sampling(max_tokens=rng.randint(1, 8))
    changes: dict[str, Any] = {}
    if rng.random() < 0.4:
        changes |= {"temperature": rng.choice([0.6, 1.3]), "seed": rng.randrange(10**6)}
        changes |= {"top_k": rng.choice([0, 0, 5]), "top_p": rng.choice([1.0, 1.0, 0.7])}
    if rng.random() < 0.35:
        changes |= {"repetition_penalty": rng.choice([1.0, 1.5, 0.7])}
        changes |= {"presence_penalty": rng.choice([0.0, 1.9, -1.1]), "frequency_penalty": rng.choice([0.0, 0.9, -0.7])}
    if rng.random() < 0.25:
        end = min(target.eos_ids)
        tokens = rng.sample(range(target.vocabulary - 2), 2) + [end] * rng.randint(0, 1)
        changes["logit_bias"] = tuple((token, rng.choice([-100.0, 2.5, 4.5])) for token in tokens)
    if rng.random() < 0.3:
        changes["min_tokens"] = rng.randint(1, sampling.max_tokens)
    if free and rng.random() < 0.4:
        start = rng.randrange(len(free))
        changes["stop"] = ("\N{SNOWMAN}", free[start : start + rng.randint(1, 3)])
    return replace(sampling, **changes)
