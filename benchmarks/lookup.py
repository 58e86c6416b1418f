"""What drafting by lookup costs, and that it does not grow with the text: `python -m benchmarks.lookup`.

Prints microseconds a draft and microseconds a token added, for texts of a request's own and for the answers of a job,
up to 32k tokens; then the milliseconds of a whole batch's drafting in a step. The text is drawn from a Zipf
distribution over 49,152 words, with phrases of it repeated as answers repeat their passages. One thread, medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from ragspec.decoding.drafting import DraftingPanel
from ragspec.decoding.job_answers import JobAnswers
from ragspec.decoding.lookup import JobDrafter, OwnTextDrafter
from ragspec.decoding.request import Request
from ragspec.decoding.step_cost import FREE, StepCost, StepLoad
from ragspec.decoding.width import WidthController

SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
VOCABULARY = 49_152
ANSWER = 64
#: A draft over the longest text may take so much longer than over the shortest.
LIMIT = 3.0


def text(size: int, seed: int) -> list[int]:
    """Tokens, a third of them in phrases of 3 to 30 that stood before."""
    rng = random.Random(seed)
    words = range(VOCABULARY)
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(VOCABULARY)))
    tokens: list[int] = []
    while len(tokens) < size:
        if len(tokens) > 100 and rng.random() < 0.02:
            start = rng.randrange(len(tokens) - 30)
            tokens += tokens[start : start + rng.randint(3, 30)]
        else:
            tokens += rng.choices(words, cum_weights=weights)
    return tokens[:size]


def microseconds(verb: Callable[[], object], times: int) -> float:
    """Median of `times` calls."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        verb()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def own_text(size: int, times: int) -> dict[str, float]:
    """A request whose prompt has `size` tokens."""
    tokens = text(size, 1)
    drafter = OwnTextDrafter()
    request = Request("r", tuple(tokens))
    indexing = microseconds(lambda: drafter.begin(request), 5)
    following = itertools.cycle(tokens[size // 2 :])
    extend = microseconds(lambda: drafter.observe("r", [next(following)], None), times)
    return {
        "text": size,
        "draft_us": round(microseconds(lambda: drafter.propose({"r": 10}), times), 1),
        "extend_us": round(extend, 1),
        "prompt_us_per_token": round(indexing / size, 2),
    }


def job_answers(size: int, times: int) -> dict[str, float]:
    """A request whose job has given answers of `size` tokens, no more of which are kept."""
    tokens = text(size, 2)
    drafter = JobDrafter(JobAnswers(group_tokens=size))
    pieces: Iterator[list[int]] = (
        tokens[start : start + ANSWER] for start in itertools.cycle(range(0, size - ANSWER + 1, ANSWER))
    )

    def answer() -> None:
        drafter.begin(Request("other", (1,), group="job"))
        drafter.observe("other", next(pieces), None)
        drafter.end("other")

    drafter.begin(Request("r", (1,), group="job"))
    for _ in range(size // ANSWER):
        answer()
    drafter.observe("r", tokens[: ANSWER // 2], None)
    return {
        "text": size,
        "draft_us": round(microseconds(lambda: drafter.propose({"r": 10}), times), 1),
        "extend_us": round(microseconds(answer, times) / ANSWER, 2),
    }


def whole_batch(batch: int, times: int) -> float:
    """Milliseconds of a step's drafting: lookups, estimates, the choice of widths, and learning from the verdicts."""
    panel = DraftingPanel([OwnTextDrafter(), JobDrafter()], VOCABULARY)
    chooser = WidthController(panel, StepCost(FREE))
    prompts = [text(700, seed) for seed in range(batch)]
    names = [str(number) for number in range(batch)]
    for name, prompt in zip(names, prompts, strict=True):
        panel.begin(Request(name, tuple(prompt), group="job"))
    step = itertools.count()

    def draft() -> None:
        number = next(step)
        drafts = chooser.draft(dict.fromkeys(names, 10), StepLoad(batch, 700))
        for name, prompt in zip(names, prompts, strict=True):
            if name in drafts:
                chooser.record(name, drafts[name], 1)
            panel.observe(name, prompt[number * 2 % 600 : number * 2 % 600 + 2], None)

    return microseconds(draft, times) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=300, help="calls timed for each figure")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    wanted = parser.parse_args()
    own = [own_text(size, wanted.times) for size in SIZES]
    job = [job_answers(size, wanted.times) for size in SIZES]
    batches = {str(batch): round(whole_batch(batch, wanted.times), 3) for batch in (1, 8, 16, 32)}
    growth = max(curve[-1]["draft_us"] / curve[0]["draft_us"] for curve in (own, job))
    result = {"own": own, "job": job, "step_ms_by_batch": batches, "growth": round(growth, 2), "limit": LIMIT}
    if wanted.format == "json":
        print(json.dumps(result))
    else:
        for title, curve in (("a request's own text", own), ("answers of a job", job)):
            print(f"{title}\n" + "".join(f"{name:>22}" for name in curve[0]))
            for row in curve:
                print("".join(f"{value:>22}" for value in row.values()))
        print("\ndrafting in a step, ms  " + "  ".join(f"batch {batch}: {ms}" for batch, ms in batches.items()))
        print(f"growth from {SIZES[0]} to {SIZES[-1]} tokens  {growth:.2f}")
    sys.exit(growth > LIMIT)


main()
