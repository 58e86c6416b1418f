"""What the order of passages saves and costs.

`python -m benchmarks.passage_order --data FOLDER [--limit N] [--orders NAME ...] [--count]`

FOLDER holds `passages.jsonl` (id, title, text) and `questions.jsonl` (question, answers). The three best passages of each
question are found by cosine similarity; then every question is answered by one engine with each order of passages in turn, the
prompts sorted so that those which begin alike follow one another, and the answers are scored. `--count` only counts the prompt
tokens that prompts share, and decodes nothing:

- job: with all questions in one order, shard: where each 64 stand by themselves, both with room for every prefix;
- unordered: in a random order, with 16 sequences running and 64 prefixes kept.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ragspec.corpus.embedder import load_embedder
from ragspec.corpus.passage import Passage
from ragspec.decoding.slots import SlotPool
from ragspec.evaluation import Gold, score
from ragspec.models import ensure_target
from ragspec.prompt.arrangement import arrange
from ragspec.prompt.builder import Prompt, PromptBuilder
from ragspec.settings import Settings, load_settings

TOP_K = 3
SHARD = 64
WORKING, KEEPING = 16, 64

#: How the template gets the passages, out of best first; it shows the last one first.
Arranging = Callable[[Sequence[Passage]], list[Passage]]


def _canonical(passages: Sequence[Passage]) -> list[Passage]:
    return sorted(passages, key=lambda passage: (passage.document, passage.id), reverse=True)


def _longest_first_but_best_last(passages: Sequence[Passage]) -> list[Passage]:
    return [*passages[:1], *arrange(passages[1:], "shared")]


ORDERS: dict[str, Arranging] = {
    "score": lambda passages: arrange(passages, "score"),
    "best first": lambda passages: list(reversed(passages)),
    "by id": _canonical,
    "shared": lambda passages: arrange(passages, "shared"),
    "shared, best last": _longest_first_but_best_last,
}
#: Those that are decoded where none are named.
DECODED = ("score", "shared", "shared, best last")


class _NoMemory:
    """Counting needs no keys and values."""

    def copy_prefix(self, source: int, destination: int, length: int) -> None: ...

    def clear(self, slot: int) -> None: ...


def retrieve(settings: Settings, data: Path, questions: Sequence[str]) -> list[list[Passage]]:
    """The best passages of each question, best first."""
    rows = [json.loads(line) for line in (data / "passages.jsonl").read_text(encoding="utf-8").splitlines()]
    embedder = load_embedder(settings)
    stored = np.array(embedder.embed([row["text"] for row in rows], "passage"))
    similar = np.array(embedder.embed(list(questions))) @ stored.T
    best = np.argsort(-similar, axis=1, kind="stable")[:, :TOP_K]
    return [
        [Passage(rows[i]["id"], rows[i]["text"], float(of[i]), rows[i]["id"], rows[i]["title"]) for i in found]
        for found, of in zip(best, similar, strict=True)
    ]


def shared_tokens(prompts: Iterable[tuple[int, ...]]) -> int:
    """Prompt tokens that need not be computed with room for every prefix: what each shares with its neighbour in a trie."""
    ordered = sorted(prompts)
    return sum(_common(one, other) for one, other in pairwise(ordered))


def cached_tokens(prompts: Sequence[tuple[int, ...]]) -> int:
    """Prompt tokens that a pool of slots serves when the prompts come in this order."""
    pool = SlotPool(_NoMemory(), working=WORKING, keeping=KEEPING)
    running: list[tuple[int, tuple[int, ...]]] = []
    hits = 0
    for prompt in prompts:
        if len(running) == WORKING:
            pool.release(*running.pop(0))
        match = pool.find(prompt[:-1], {})
        if match is None:
            msg = "nothing grows here that one could wait for"
            raise RuntimeError(msg)
        slot = pool.take(prompt[:-1], match)
        pool.extend(slot, match.length, prompt[match.length :])
        running.append((slot, prompt))
        hits += match.length
    return hits


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    limit = min(len(left), len(right) - 1)
    return next((i for i in range(limit) if left[i] != right[i]), limit)


def count(prompts: dict[str, list[Prompt]]) -> None:
    """Print what each order shares."""
    print(f"{'order':<20}{'job':>8}{'shard':>8}{'unordered':>11}   share of prompt tokens that are not computed")
    for name, built in prompts.items():
        tokens = [prompt.token_ids for prompt in built]
        shards = [tokens[start : start + SHARD] for start in range(0, len(tokens), SHARD)]
        shuffled = random.Random(0).sample(tokens, len(tokens))
        found = (shared_tokens(tokens), sum(map(shared_tokens, shards)), cached_tokens(shuffled))
        total = sum(map(len, tokens))
        print(f"{name:<20}{found[0] / total:>8.1%}{found[1] / total:>8.1%}{found[2] / total:>11.1%}", flush=True)


def decode(
    settings: Settings, prompts: dict[str, list[Prompt]], orders: Sequence[str], gold: Sequence[Gold], max_tokens: int
) -> None:
    """Answer every question with each order and print scores and speed."""
    from ragspec.assembly import make_engine
    from ragspec.decoding.loading import load_configured
    from ragspec.decoding.profiling import profile_steps
    from ragspec.decoding.request import Request, Sampling

    target = load_configured(settings)
    profile = profile_steps(target, max_batch=settings.max_batch, window=settings.context_window)
    print(f"{'order':<20}{'EM':>8}{'contains':>10}{'F1':>8}{'hits':>8}{'seconds':>10}{'questions/s':>13}")
    for name in orders:
        engine = make_engine(settings, target, step_profile=profile)
        started = time.perf_counter()
        for number, prompt in sorted(enumerate(prompts[name]), key=lambda numbered: numbered[1].token_ids):
            engine.add(
                Request(
                    str(number), prompt.token_ids, Sampling(max_tokens=max_tokens), prompt.passage_spans, group="job"
                )
            )
        answers: dict[int, str] = {}
        while engine.has_work:
            answers |= {int(completion.request_id): completion.text for completion in engine.step()}
        seconds = time.perf_counter() - started
        scores = score((one, answers[i], ()) for i, one in enumerate(gold))
        hits = engine.prefix_hit_tokens / engine.prompt_tokens
        print(
            f"{name:<20}{scores.exact_match:>8.2%}{scores.contains:>10.2%}{scores.f1:>8.2%}{hits:>8.1%}"
            f"{seconds:>10.1f}{len(answers) / seconds:>13.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="questions used; default: all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=DECODED, help="which to answer with")
    parser.add_argument("--count", action="store_true", help="count shared prompt tokens only")
    wanted = parser.parse_args()
    settings = load_settings()
    lines = (wanted.data / "questions.jsonl").read_text(encoding="utf-8").splitlines()[: wanted.limit]
    rows = [json.loads(line) for line in lines]
    questions = [str(row["question"]) for row in rows]
    found = retrieve(settings, wanted.data, questions)

    from transformers import AutoTokenizer

    builder = PromptBuilder(AutoTokenizer.from_pretrained(ensure_target(settings)), settings.context_window)
    prompts = {
        name: [builder.build(q, order(p), wanted.max_tokens) for q, p in zip(questions, found, strict=True)]
        for name, order in ORDERS.items()
    }
    if wanted.count:
        count(prompts)
    else:
        decode(settings, prompts, wanted.orders, [Gold(tuple(row["answers"])) for row in rows], wanted.max_tokens)


main()
