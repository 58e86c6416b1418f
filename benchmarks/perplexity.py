"""What a precision costs in quality: `python -m benchmarks.perplexity [--texts FILE] [--precision P ...]`.

The target reads the same text in each precision, in windows of its own, and the perplexity says how well it foresees it. The
first precision named is what the others are held against. FILE is JSON Lines with a field `text` (a file of passages, say);
without it the text is CPython's language reference, which comes with Python.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.loading import load_configured
from ragspec.decoding.target import Target
from ragspec.settings import load_settings

#: What the project promises of int8: perplexity over that of bfloat16, less one.
LIMIT = 0.01


def read_text(path: Path | None) -> str:
    """The text to be foreseen."""
    if path is None:
        return "\n\n".join(topics[name] for name in sorted(topics))
    return "\n\n".join(json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines())


@torch.inference_mode()
def perplexity(target: Target, tokens: list[int], window: int) -> float:
    """Exponential of the mean negative log-probability of each token behind the first of its window."""
    cache = target.make_cache(1, window)
    loss, count = 0.0, 0
    for start in range(0, len(tokens) - 1, window):
        text = tokens[start : start + window]
        out = target.forward(cache, [Segment(0, 0, len(text))], text, list(range(len(text))))
        rows = torch.arange(len(text) - 1)
        foreseen = out.logits[rows, torch.tensor(text[1:])].float() - out.normalizers[rows]
        loss -= float(foreseen.double().sum())
        count += len(rows)
    return math.exp(loss / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="JSON Lines with a field `text`")
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens read")
    parser.add_argument("--window", type=int, default=512, help="tokens read together")
    wanted = parser.parse_args()
    settings = load_settings()
    found: dict[str, float] = {}
    for precision in wanted.precision:
        target = load_configured(settings.model_copy(update={"precision": precision}))
        tokens = target.tokenizer(read_text(wanted.texts))["input_ids"][: wanted.tokens]
        found[precision] = perplexity(target, tokens, wanted.window)
        against = found[precision] / found[wanted.precision[0]] - 1
        print(
            f"{precision:<10} perplexity {found[precision]:.4f} over {len(tokens)} tokens, {against:+.2%}", flush=True
        )
    if {"bfloat16", "int8"} <= found.keys():
        sys.exit(found["int8"] / found["bfloat16"] - 1 > LIMIT)


if __name__ == "__main__":
    main()
