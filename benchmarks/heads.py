"""Whether the speculation head pays in batches: `python -m benchmarks.heads [--suites FOLDER]`.

For each batch size two engines, one with lookup alone and one with the head beside it, decode the same prompts side
by side (`benchmarks.lockstep` says what is timed). FOLDER holds JSON Lines files with a field `prompt`; without it the
prompts are the demo's. One at a time, by place and with the head alone: `ragspec head eval`.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.lockstep import Bench, Run, make_bench, parse, promises_hold, rows_of
from ragspec.assembly import make_drafters
from ragspec.decoding.acceptance import Source
from ragspec.decoding.head_drafter import HeadDrafter
from ragspec.decoding.profiling import profile_steps
from ragspec.decoding.target import Target
from ragspec.settings import Settings

#: Least ratio of decode speeds, both over lookup alone, that the project promises, by batch size; others promise `FLOOR`.
PROMISED = {1: 1.10}
FLOOR = 1.0


def make(settings: Settings, target: Target, batch: int) -> dict[str, Bench]:
    """One engine with lookup alone, one with the head too."""
    both = make_drafters(settings, target)
    lookups = make_drafters(settings.model_copy(update={"head": "none"}), target)
    if not any(isinstance(drafter, HeadDrafter) for drafter in both):
        sys.exit("nothing drafts with a head: set RAGSPEC_HEAD, and RAGSPEC_MAX_DRAFT above 0")
    profile = profile_steps(target, max_batch=batch, window=settings.context_window)
    return {
        "lookup": make_bench(target, settings, batch, lookups, profile),
        "both": make_bench(target, settings, batch, both, profile),
    }


def judge(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Ratios of the runs that went side by side."""
    ratios = [both.speed / lookup.speed for lookup, both in zip(runs["lookup"], runs["both"], strict=True)]
    row: dict[str, Any] = {"ratio": round(statistics.median(ratios), 3), "least": round(min(ratios), 3)}
    for name, all_runs in runs.items():
        row[f"{name}_tok_s"] = round(statistics.median(run.speed for run in all_runs), 1)
        row[f"{name}_length"] = round(sum(run.tokens for run in all_runs) / sum(run.steps for run in all_runs), 2)
    tokens = [
        source for run in runs["both"] for completion in run.done for source in completion.acceptance.token_sources
    ]
    row["by_head"] = round(tokens.count(Source.HEAD) / len(tokens), 3)
    return row


def main() -> None:
    rows = rows_of(parse(__doc__), make, judge)
    sys.exit(not promises_hold(rows, PROMISED, FLOOR))


if __name__ == "__main__":
    main()
