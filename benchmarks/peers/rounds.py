"""Alternating runs: each round every peer has its turn, in a fresh process, alone on the machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.peer import Peer
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.protocol import Answers, Load, Prompt, Ready

#: Answer tokens of the warm-up run.
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked of every peer.

    Attributes:
        prompts: in the order in which they are handed over.
        warm_up: prompts of the untimed first run; they share no prefix with `prompts`.
        max_tokens: most tokens of an answer.
        load: what to get ready, but for the peer's own options.
    """

    prompts: tuple[Prompt, ...]
    warm_up: tuple[Prompt, ...]
    max_tokens: int
    load: Load


@dataclass(slots=True)
class Measured:
    """What came of a peer.

    Attributes:
        peer: which.
        ready: what it said of itself, from its first turn.
        runs: its finished turns, without end tokens.
        failure: why it has no more of them; empty where nothing went wrong.
    """

    peer: Peer
    ready: Ready | None = None
    runs: list[Answers] = field(default_factory=list)
    failure: str = ""

    @property
    def seconds(self) -> float:
        """Median time of a run."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def output_tokens(self) -> float:
        """Median number of answer tokens of a run, end tokens not counted."""
        return statistics.median(sum(map(len, run.outputs)) for run in self.runs)


#: How to start a peer, or the reason why it cannot be.
Command = Callable[[Peer], Sequence[str]]


def alternate(
    task: Task,
    peers: Sequence[Peer],
    rounds: int,
    command: Command,
    logs: Path,
    *,
    timeout_s: float,
    tell: Callable[[str], None],
) -> list[Measured]:
    """Measure all peers, round after round; one that fails is left out from then on, and the others go on.

    A fresh process for every turn: nothing that an earlier run left in a cache can serve a later one, no peer waits for its
    turn with threads spinning, and none holds memory that another needs.

    Args:
        task: what is asked.
        peers: in the order of a round.
        rounds: turns of each peer.
        command: gives the command line of a peer, or raises `PeerError`.
        logs: folder for what the peers write to standard error.
        timeout_s: longest that a peer may load, and longest that a run may take.
        tell: gets one line a turn.
    """
    measured = [Measured(peer) for peer in peers]
    for number in range(1, rounds + 1):
        for one in measured:
            if one.failure:
                continue
            try:
                answers = _turn(task, one, command, logs, timeout_s)
            except PeerError as error:
                one.failure = str(error)
                tell(f"round {number}: {one.peer.name}: {one.failure}")
                continue
            one.runs.append(answers)
            tell(f"round {number}: {one.peer.name}: {len(task.prompts) / answers.seconds:.3f} questions/s")
    return measured


def _turn(task: Task, one: Measured, command: Command, logs: Path, timeout_s: float) -> Answers:
    load = _for_peer(task.load, one.peer)
    with PeerProcess(command(one.peer), logs / f"{one.peer.name}.log", load.threads, timeout_s) as process:
        one.ready = process.load(load)
        process.run(task.warm_up, min(WARM_UP_TOKENS, task.max_tokens))
        return _checked(process.run(task.prompts, task.max_tokens), task)


def _for_peer(load: Load, peer: Peer) -> Load:
    if peer.gguf and not load.gguf:
        raise PeerError("it reads GGUF, and there is no GGUF file of this model: name one with --gguf")
    return Load(
        folder=load.folder,
        gguf=load.gguf,
        threads=load.threads,
        concurrency=load.concurrency,
        window=load.window,
        cache_gb=load.cache_gb,
        end_tokens=load.end_tokens,
        options=peer.options,
    )


def _checked(answers: Answers, task: Task) -> Answers:
    """The answers cut at the first end token and at the limit, if the peer read what it was given and answered it all.

    Raises:
        PeerError: it did not.
    """
    if len(answers.outputs) != len(task.prompts):
        raise PeerError(f"it answered {len(answers.outputs)} of {len(task.prompts)} prompts")
    for place, (counted, prompt) in enumerate(zip(answers.prompt_tokens or (), task.prompts, strict=False), 1):
        if counted != len(prompt.tokens):
            raise PeerError(f"it counts {counted} tokens in prompt {place}, which has {len(prompt.tokens)}")
    empty = next((place for place, output in enumerate(answers.outputs, 1) if not output), None)
    if empty is not None:
        raise PeerError(f"it wrote nothing to prompt {empty}, not even an end token")
    outputs = tuple(_cut(output, task) for output in answers.outputs)
    return Answers(outputs, answers.seconds, answers.prompt_tokens, answers.cached_tokens)


def _cut(output: tuple[int, ...], task: Task) -> tuple[int, ...]:
    end = next((place for place, token in enumerate(output) if token in task.load.end_tokens), len(output))
    return output[: min(end, task.max_tokens)]
