"""What speculation saves, one question at a time: `python -m benchmarks.speculation [--prompts FILE]`.

Every prompt is decoded with drafts and without, by the same engine, right after one another and in turns, so that both see
the same machine. Decode time runs from an answer's first token to its last; the prompt's own forward pass is the same for
both and printed apart. FILE is JSON Lines with a field `prompt` (Spec-Bench's rag.jsonl, say); without it the prompts are the
demo's questions over CPython's language reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ragspec.assembly import make_engine
from ragspec.decoding.acceptance import Source
from ragspec.decoding.engine import Engine
from ragspec.decoding.loading import load_configured
from ragspec.decoding.request import Completion, Request
from ragspec.heads.prompts import read_prompts
from ragspec.settings import load_settings

#: What the project promises: decode time with drafts over decode time without.
LIMIT = 0.65


@dataclass
class Side:
    """Sums over the answers of one way to decode."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, done: Completion) -> None:
        """Count an answer."""
        self.decode_s += done.decode_s
        self.prefill_s += done.prefill_s
        self.tokens += done.completion_tokens - 1
        self.steps += done.acceptance.num_verify_steps
        self.drafted += done.acceptance.num_draft_tokens
        self.accepted += done.acceptance.num_accepted_draft_tokens


def decode(engine: Engine, request: Request) -> Completion:
    """One answer, alone in the engine."""
    engine.add(request)
    while True:
        for done in engine.step():
            return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSON Lines with a field `prompt`")
    parser.add_argument("--limit", type=int, default=40, help="prompts used")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    wanted = parser.parse_args()
    settings = load_settings()
    target = load_configured(settings)
    # The two sides decode the same prompt: the second must not find it in the cache.
    engine = make_engine(settings, target, max_batch=1, prefix_cache=0)
    requests = read_prompts(target, wanted.prompts, wanted.max_tokens, engine.window)
    requests = [r for r in requests if len(r.prompt) < engine.window][: wanted.limit]

    sides = {True: Side(), False: Side()}
    ratios = []
    parted = 0
    sources = dict.fromkeys(Source, 0)
    decode(engine, replace(requests[0], id="warm-up"))
    started = time.perf_counter()
    for number, request in enumerate(requests):
        done = {}
        for drafts in (True, False) if number % 2 else (False, True):
            sampling = replace(request.sampling, speculation=drafts)
            done[drafts] = decode(engine, replace(request, sampling=sampling))
            sides[drafts].add(done[drafts])
        for source in done[True].acceptance.token_sources:
            sources[source] += 1
        parted += done[True].acceptance.token_ids != done[False].acceptance.token_ids
        if done[False].decode_s > 0:
            ratios.append(done[True].decode_s / done[False].decode_s)
    with_drafts, plain = sides[True], sides[False]
    result = {
        "prompts": len(requests),
        "precision": target.precision,
        "decode_s_with_drafts": round(with_drafts.decode_s, 2),
        "decode_s_without": round(plain.decode_s, 2),
        "limit": LIMIT,
        "decode_ratio": round(with_drafts.decode_s / plain.decode_s, 3),
        "decode_ratio_per_token": round(with_drafts.decode_s / with_drafts.tokens / (plain.decode_s / plain.tokens), 3),
        "decode_ratio_median": round(statistics.median(ratios), 3),
        "prefill_s": round(plain.prefill_s, 2),
        "mean_acceptance_length": round(with_drafts.tokens / with_drafts.steps, 3),
        "draft_acceptance_rate": round(with_drafts.accepted / max(1, with_drafts.drafted), 3),
        "tokens_by_source": {source.name.lower(): count for source, count in sources.items() if count},
        "answers_that_part": parted,
        "seconds": round(time.perf_counter() - started, 1),
    }
    if wanted.format == "json":
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<24} {value}")
    sys.exit(with_drafts.decode_s > LIMIT * plain.decode_s)


main()
