"""Engines that decode the same prompts side by side, so that what disturbs the machine disturbs all of them alike.

Always that one steps which has emitted least, so all of them end together.

Decode speed is tokens a second in steps that carry no prompt and in which at least three quarters of the batch decode. Prompts
are taken whole into one step, so that there are such steps, in later runs out of the cache where it holds them. The first run
is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from ragspec.assembly import make_engine
from ragspec.decoding.attention import Segment
from ragspec.decoding.draft import Draft, Drafter
from ragspec.decoding.engine import Engine
from ragspec.decoding.loading import load_configured
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.decoding.step_cost import StepProfile
from ragspec.decoding.target import StepOutput, Target
from ragspec.demo.prompts import demo_prompts
from ragspec.prompt import PromptBuilder
from ragspec.settings import Settings, load_settings


class WatchedTarget:
    """A target that notes how long its last forward pass took, and whether a prompt was in it: only there are rows whose
    logits nobody wants.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.seconds = 0.0
        self.sequences = 0
        self.rows = 0
        self.wanted = 0
        self.prompt = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(
        self, cache: Any, segments: Sequence[Segment], tokens: list[int], rows: list[int], **wanted: Any
    ) -> StepOutput:
        began = time.perf_counter()
        output = self._target.forward(cache, segments, tokens, rows, **wanted)
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        self.seconds = time.perf_counter() - began
        self.sequences = len(segments)
        self.rows = len(tokens)
        self.wanted += len(rows)
        self.prompt = len(rows) < len(tokens)
        return output


class Counter:
    """A drafter that drafts nothing and counts what is emitted."""

    name = "counter"

    def __init__(self) -> None:
        self.emitted = 0

    def begin(self, request: Request) -> None: ...

    def observe(self, request_id: str, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        del request_id, hidden
        self.emitted += len(tokens)

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        del limits
        return {}

    def end(self, request_id: str) -> None: ...


@dataclass
class Run:
    """What the steps that count of one way to decode a suite once did, and all that it gave.

    Attributes:
        tokens: emitted.
        passes: steps of the engine.
        steps: verify steps: one for each sequence in a step.
        drafted: draft tokens.
        seconds: of the steps.
        inside_s: of these, in the target's forward pass.
        done: completions.
    """

    tokens: int = 0
    passes: int = 0
    steps: int = 0
    drafted: int = 0
    seconds: float = 0.0
    inside_s: float = 0.0
    done: list[Completion] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def milliseconds(self) -> float:
        return 1000 * self.seconds / self.passes

    @property
    def outside(self) -> float:
        return 1 - self.inside_s / self.seconds


def read_suites(folder: Path | None, target: Target, window: int, sampling: Sampling) -> dict[str, list[Request]]:
    """Requests by suite, each with a seed of its own; all of a suite's are one job."""
    max_tokens = sampling.max_tokens
    if folder is None:
        prompts = demo_prompts(PromptBuilder(target.tokenizer, window), max_tokens)
        found = [
            Request(str(i), p.token_ids, replace(sampling, seed=i), p.passage_spans, group="demo")
            for i, p in enumerate(prompts)
        ]
        return {"demo": found}
    suites: dict[str, list[Request]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        requests = suites[path.stem] = []
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            messages = [{"role": "user", "content": json.loads(line)["prompt"]}]
            text = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            tokens = tuple(target.tokenizer(str(text), add_special_tokens=False)["input_ids"])
            if len(tokens) + max_tokens <= window:
                requests.append(
                    Request(str(i), tokens, replace(sampling, seed=i), ((0, len(tokens)),), group=path.stem)
                )
    return suites


@dataclass(frozen=True)
class Bench:
    """An engine for one batch size, and what watches it; `drafts` says whether it has drafters."""

    engine: Engine
    watched: WatchedTarget
    counter: Counter
    batch: int
    drafts: bool

    @property
    def emitted(self) -> int:
        """Tokens so far. Without drafts each row that is wanted gives one."""
        return self.counter.emitted if self.drafts else self.watched.wanted

    def add(self, requests: Sequence[Request], number: int) -> None:
        """Requests of a run: a job of its own each time, since what an earlier run answered must not be copied from."""
        for request in requests:
            self.engine.add(replace(request, group=f"{request.group}-{number}"))

    def step(self, run: Run) -> None:
        """One step, counted where it counts."""
        before, prompts = self.emitted, self.engine.prompt_tokens
        began = time.perf_counter()
        done = self.engine.step()
        seconds = time.perf_counter() - began
        run.done += done
        carried = self.watched.prompt or self.engine.prompt_tokens > prompts
        if not carried and 4 * self.watched.sequences >= 3 * self.batch:
            run.seconds += seconds
            run.inside_s += self.watched.seconds
            run.tokens += self.emitted - before
            run.passes += 1
            run.steps += self.watched.sequences
            run.drafted += self.watched.rows - self.watched.sequences


def make_bench(
    target: Target,
    settings: Settings,
    batch: int,
    drafters: Sequence[Drafter],
    profile: StepProfile,
) -> Bench:
    """An engine as a worker would have it, but that it takes whole prompts into one step, and drafts only with `drafters`."""
    watched, counter = WatchedTarget(target), Counter()
    engine = make_engine(
        settings if drafters else settings.model_copy(update={"max_draft": 0}),
        cast("Target", watched),
        max_batch=batch,
        prefill_chunk=batch * settings.context_window,
        drafters=[*drafters, counter],
        step_profile=profile,
    )
    return Bench(engine, watched, counter, batch, drafts=bool(drafters))


def race(benches: Mapping[str, Bench], requests: Sequence[Request], runs: int) -> dict[str, list[Run]]:
    """Let all of them decode the requests."""
    finished: dict[str, list[Run]] = {name: [] for name in benches}
    for number in range(runs + 1):
        current = {name: Run() for name in benches}
        for bench in benches.values():
            bench.add(requests, number)
        began = {name: bench.emitted for name, bench in benches.items()}
        while at_work := [name for name, bench in benches.items() if bench.engine.has_work]:
            last = min(at_work, key=lambda name: benches[name].emitted - began[name])
            benches[last].step(current[last])
        if number:
            for name, run in current.items():
                finished[name].append(run)
    return finished


def parse(description: str | None) -> argparse.Namespace:
    """What to decode, and how often."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=Path, help="folder of JSON Lines files with a field `prompt`")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--prompts", type=int, default=40, help="prompts of a suite, and at least a whole batch")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="of the requests; 0, the default, is greedy")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="nucleus mass of sampled requests; 1, the default, keeps all"
    )
    parser.add_argument("--runs", type=int, default=3, help="that are counted")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    return parser.parse_args()


def promises_hold(rows: Sequence[Mapping[str, Any]], promised: Mapping[int, float], floor: float) -> bool:
    """Say of each row on standard error whether its ratio is what the project promises.

    Args:
        rows: with `suite`, `batch` and `ratio`.
        promised: least ratio by batch size.
        floor: that of the others.
    """
    holds = True
    for row in rows:
        least = promised.get(row["batch"], floor)
        holds &= row["ratio"] >= least
        print(f"{row['suite']} at batch {row['batch']}: {_verdict(row['ratio'], least=least)}", file=sys.stderr)
    return holds


def _verdict(figure: float, *, least: float) -> str:
    return f"{figure:.3f}, at least {least:.2f} wanted: {'holds' if figure >= least else 'missed'}"


def rows_of(
    wanted: argparse.Namespace,
    make: Callable[[Settings, Target, int], dict[str, Bench]],
    judge: Callable[[dict[str, list[Run]]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Race through every suite at every batch size, and print a row of each as it comes.

    Args:
        wanted: see `parse`.
        make: the benches of a batch size.
        judge: a row out of the runs.
    """
    settings = load_settings()
    target = load_configured(settings)
    window = min(settings.context_window, target.context_window)
    sampling = Sampling(max_tokens=wanted.max_tokens, temperature=wanted.temperature, top_p=wanted.top_p)
    suites = read_suites(wanted.suites, target, window, sampling)
    rows: list[dict[str, Any]] = []
    benches: dict[str, Bench] = {}
    for batch in wanted.batches:
        benches.clear()  # the next engines take the memory of the last
        benches |= make(settings, target, batch)
        # As a worker does: what is loaded stays, and looking through it again and again takes a tenth of a second each time.
        gc.collect()
        gc.freeze()
        for suite, requests in suites.items():
            runs = race(benches, requests[: max(batch, wanted.prompts)], wanted.runs)
            if not all(run.steps for of in runs.values() for run in of):
                print(f"{suite}: its prompts never fill three quarters of a batch of {batch}", file=sys.stderr)
                continue
            rows.append({"suite": suite, "batch": batch, **judge(runs)})
            if wanted.format == "text":
                width = 2 + max(map(len, rows[0]))
                if len(rows) == 1:
                    print("".join(f"{name:>{width}}" for name in rows[0]))
                print("".join(f"{value:>{width}}" for value in rows[-1].values()), flush=True)
    if wanted.format == "json":
        print(json.dumps({"precision": target.precision, "rows": rows}))
    return rows
