"""Where answers part that should be the same: `python -m benchmarks.partings [--prompts FILE] [--precision P ...]`.

Every prompt is decoded greedily twice by the same engine: alone and plainly, one token a step, and in a batch with
speculation. Where the two answers part, the target reads prompt and common beginning once more, and the gap between its two
best logits there tells whether this was a tie within its precision's rounding. Behind a parting the answers go different ways,
so an answer parts once at most, and only positions up to there are compared. The table is that of docs/discussion/exactness.md.

FILE is JSON Lines with a field `prompt` (Spec-Bench's rag.jsonl, say); without it the prompts are the demo's questions over
CPython's language reference.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.engine import Engine
from ragspec.decoding.loading import load_configured
from ragspec.decoding.request import Request
from ragspec.decoding.target import Target
from ragspec.heads.prompts import read_prompts
from ragspec.settings import Settings, load_settings


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place where two answers to a prompt differ.

    Attributes:
        place: of the token in the answer.
        gap: between the target's two best logits there.
        distance: of the worse of the two tokens' logits from the best; the gap, unless the two are not the two best.
    """

    place: int
    gap: float
    distance: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a precision gave."""

    precision: str
    answers: int
    compared: int
    partings: tuple[Parting, ...]

    def row(self) -> str:
        """The precision's row of the table."""
        measures = ["-", "-", "-"]
        if self.partings:
            gaps = [parting.gap for parting in self.partings]
            farthest = max(parting.distance for parting in self.partings)
            measures = [f"{value:.4g}" for value in (statistics.median(gaps), max(gaps), farthest)]
        cells = [self.precision, self.answers, len(self.partings), self.compared, *measures]
        return f"| {' | '.join(map(str, cells))} |"


HEADER = """\
| precision | answers | that part | positions compared | median gap | largest gap | farthest choice |
| --- | --- | --- | --- | --- | --- | --- |"""


def decode(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    """The tokens of every answer."""
    for request in requests:
        engine.add(request)
    written = {}
    while engine.has_work:
        for done in engine.step():
            written[done.request_id] = done.acceptance.token_ids
    return written


@torch.inference_mode()
def part(target: Target, prompt: tuple[int, ...], alone: tuple[int, ...], together: tuple[int, ...]) -> Parting | None:
    """Where two answers part, and how near a tie the target sees there."""
    place = next((i for i, (a, b) in enumerate(zip(alone, together, strict=False)) if a != b), None)
    if place is None:
        return None
    text = [*prompt, *alone[:place]]
    cache = target.make_cache(1, len(text))
    logits = target.forward(cache, [Segment(0, 0, len(text))], text, [len(text) - 1]).logits[0].float()
    best, second = logits.topk(2).values.tolist()
    return Parting(place, best - second, best - float(logits[[alone[place], together[place]]].min()))


def compare(settings: Settings, precision: str, wanted: argparse.Namespace) -> Comparison:
    """Decode every prompt in both ways."""
    target = load_configured(settings.model_copy(update={"precision": precision}))
    window = settings.context_window
    requests = read_prompts(target, wanted.prompts, wanted.max_tokens, window)
    requests = [r for r in requests if len(r.prompt) + wanted.max_tokens <= window][: wanted.limit]
    plainly = [replace(r, sampling=replace(r.sampling, speculation=False)) for r in requests]
    alone = decode(Engine(target, max_batch=1, context_window=window, max_draft=0), plainly)
    busy = Engine(target, max_batch=wanted.batch, context_window=window, max_draft=settings.max_draft)
    together = decode(busy, requests)
    found = [part(target, r.prompt, alone[r.id], together[r.id]) for r in requests]
    compared = sum(p.place + 1 if p else len(alone[r.id]) for r, p in zip(requests, found, strict=True))
    return Comparison(precision, len(requests), compared, tuple(p for p in found if p))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSON Lines with a field `prompt`")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--limit", type=int, default=40, help="prompts used")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    wanted = parser.parse_args()
    settings = load_settings()
    print(HEADER, flush=True)
    gaps = []
    for precision in wanted.precision:
        result = compare(settings, precision, wanted)
        print(result.row(), flush=True)
        gaps.append(f"{precision}: {sorted(round(parting.gap, 4) for parting in result.partings)}")
    print("", "Gaps:", *gaps, sep="\n")


main()
