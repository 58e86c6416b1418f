"""Whether the speculation head pays in batches: `python -m benchmarks.heads [--suites FOLDER]`.

For each batch size two engines, one with lookup alone and one with the head beside it, decode the same prompts in turns. What
is timed, and how, is as in `benchmarks.width`. FOLDER holds JSON Lines files with a field `prompt`; without it the prompts are
the demo's. One at a time, by place and with the head alone: `ragspec head eval`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.width import Bench, Run, make_bench, read_suites
from ragspec.assembly import make_drafters
from ragspec.decoding.acceptance import Source
from ragspec.decoding.head_drafter import HeadDrafter
from ragspec.decoding.loading import load_configured
from ragspec.decoding.profiling import profile_steps
from ragspec.decoding.request import Request
from ragspec.settings import load_settings

#: Least ratio of decode speeds, both over lookup alone, that the project promises, by batch size; others promise `FLOOR`.
PROMISED = {1: 1.10}
FLOOR = 1.0


def compare(benches: dict[str, Bench], requests: Sequence[Request], runs: int) -> dict[str, Any]:
    """Medians over alternating runs."""
    done: dict[str, list[Run]] = {name: [] for name in benches}
    for number in range(-1, runs):
        names = list(benches) if number % 2 else list(reversed(benches))
        for name in names:
            # A job of its own each time: what an earlier run answered must not be copied from.
            fresh = [replace(request, group=f"{request.group}-{name}-{number}") for request in requests]
            run = benches[name].decode(fresh if number >= 0 else fresh[:2], drafts=True)
            if number >= 0:  # before that it warms up
                done[name].append(run)
    ratios = [both.speed / lookup.speed for lookup, both in zip(done["lookup"], done["both"], strict=True)]
    row: dict[str, Any] = {"ratio": round(statistics.median(ratios), 3), "least": round(min(ratios), 3)}
    for name, all_runs in done.items():
        records = [completion.acceptance for run in all_runs for completion in run.done]
        steps = sum(record.num_verify_steps for record in records)
        row[f"{name}_tok_s"] = round(statistics.median(run.speed for run in all_runs), 1)
        row[f"{name}_length"] = round(sum(len(record.token_ids) - 1 for record in records) / steps, 2)
    tokens = [
        source for run in done["both"] for completion in run.done for source in completion.acceptance.token_sources
    ]
    row["by_head"] = round(tokens.count(Source.HEAD) / len(tokens), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=Path, help="folder of JSON Lines files with a field `prompt`")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a suite, and at least a whole batch")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3, help="of each engine")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    wanted = parser.parse_args()
    settings = load_settings()
    target = load_configured(settings)
    window = min(settings.context_window, target.context_window)
    if not any(isinstance(drafter, HeadDrafter) for drafter in make_drafters(settings, target)):
        sys.exit("there is no head for this target: set RAGSPEC_HEAD")
    suites = read_suites(wanted.suites, target, window, wanted.max_tokens)
    rows: list[dict[str, Any]] = []
    for batch in wanted.batches:
        profile = profile_steps(target, max_batch=batch, window=window)
        both = make_drafters(settings, target)
        lookups = [drafter for drafter in make_drafters(settings, target) if not isinstance(drafter, HeadDrafter)]
        benches = {
            "lookup": make_bench(target, settings, batch, lookups, profile),
            "both": make_bench(target, settings, batch, both, profile),
        }
        for suite, requests in suites.items():
            found = compare(benches, requests[: max(batch, wanted.prompts)], wanted.runs)
            rows.append({"suite": suite, "batch": batch, **found})
            if wanted.format == "text":
                if len(rows) == 1:
                    print("".join(f"{name:>15}" for name in rows[0]))
                print("".join(f"{value:>15}" for value in rows[-1].values()), flush=True)
    if wanted.format == "json":
        print(json.dumps({"precision": target.precision, "rows": rows}))
    sys.exit(any(row["ratio"] < PROMISED.get(row["batch"], FLOOR) for row in rows))


if __name__ == "__main__":
    main()
