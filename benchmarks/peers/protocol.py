"""What harness and peer say to one another: JSON objects, one a line, over the peer's standard input and output.

    harness: {"folder": ..., "threads": 2, ...}             a `Load`; answered, when the model is ready, by a `Ready`
    harness: {"prompts": [...], "max_tokens": 128}          answered by an `Answers`; as often as wanted
    harness: end of input                                   the peer exits

A peer that cannot go on raises: its process ends, and its last line on standard error is the reason that the table shows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        tokens: ids of the target's own tokenizer, chat template included; peers are handed these and no text.
        passages: [start, end) token ranges of retrieved passages, where the suite knows them.
    """

    tokens: tuple[int, ...]
    passages: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What a peer is to get ready.

    Attributes:
        folder: the model as config, safetensors and tokenizer.
        gguf: the same weights as the one GGUF file they came from; empty where there is none.
        threads: cores, and threads to compute with.
        concurrency: answers decoded together: 1 one at a time, else the most sequences of a batch.
        window: tokens that the longest prompt and its answer take.
        cache_gb: memory for keys and values, GiB.
        end_tokens: ids that end an answer.
        options: the variant of the peer: {"lookup": true} and the like.
    """

    folder: str
    gguf: str
    threads: int
    concurrency: int
    window: int
    cache_gb: int
    end_tokens: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """A loaded peer.

    Attributes:
        versions: what computes, by name.
        weights: what they are stored and computed in.
    """

    versions: dict[str, str]
    weights: str


@dataclass(frozen=True, slots=True)
class Answers:
    """One run over all prompts.

    Attributes:
        outputs: token ids of each answer, in the order of the prompts; with or without the end token.
        seconds: from handing over the first prompt to having the last answer.
        prompt_tokens: length of each prompt as the peer counts it; None where it does not say.
        cached_tokens: prompt tokens that came out of its prefix cache; None where it does not say.
    """

    outputs: tuple[tuple[int, ...], ...]
    seconds: float
    prompt_tokens: tuple[int, ...] | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What a runner gives back: `Answers` without the time, which `serve` takes."""

    outputs: Sequence[Sequence[int]]
    prompt_tokens: Sequence[int] | None = None
    cached_tokens: int | None = None


class Runner(Protocol):
    """A loaded peer, inside its own process."""

    @property
    def ready(self) -> Ready: ...

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """Greedy answers of at most `max_tokens` tokens that stop at an end token."""
        ...


def serve(load: Callable[[Load], Runner]) -> None:
    """A peer's main loop."""
    # Libraries print to standard output as they like: the channel gets a descriptor of its own, and they get the log.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runner = load(_load(json.loads(sys.stdin.readline())))
    _send(channel, asdict(runner.ready))
    for line in sys.stdin:
        message = json.loads(line)
        prompts = [prompt_of(row) for row in message["prompts"]]
        started = time.perf_counter()
        run = runner.run(prompts, message["max_tokens"])
        seconds = time.perf_counter() - started
        outputs = [[int(token) for token in output] for output in run.outputs]
        counted = None if run.prompt_tokens is None else list(run.prompt_tokens)
        _send(
            channel,
            {
                "outputs": outputs,
                "seconds": seconds,
                "prompt_tokens": counted,
                "cached_tokens": run.cached_tokens,
            },
        )


def prompt_of(row: dict[str, Any]) -> Prompt:
    """A `Prompt` as it came over the line."""
    return Prompt(tuple(row["tokens"]), tuple((start, end) for start, end in row["passages"]))


def answers_of(row: dict[str, Any]) -> Answers:
    """An `Answers` as it came over the line."""
    counted = row["prompt_tokens"]
    return Answers(
        outputs=tuple(tuple(output) for output in row["outputs"]),
        seconds=row["seconds"],
        prompt_tokens=None if counted is None else tuple(counted),
        cached_tokens=row["cached_tokens"],
    )


def _load(row: dict[str, Any]) -> Load:
    return Load(**{**row, "end_tokens": tuple(row["end_tokens"])})


def _send(channel: Any, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()
