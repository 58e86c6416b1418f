"""Where each millisecond of a forward pass goes: `python -m benchmarks.step_costs`.

Times decode passes by batch and width over a full context, and prompt chunks, and tells the time by kind of work where the
target does (the int8 kernels): matrix products, attention, work on single rows, the output layer with its choices, and what is
left, which is Python and the embedding. Medians, in milliseconds. The table is that of docs/discussion/step-costs.md.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from ragspec.decoding.attention import Segment
from ragspec.decoding.loading import load_configured
from ragspec.decoding.native.abi import PHASES
from ragspec.decoding.native.target import NativeTarget
from ragspec.decoding.target import Target
from ragspec.settings import load_settings

SHAPES = [
    (1, 1),
    (1, 2),
    (1, 4),
    (1, 6),
    (1, 8),
    (4, 1),
    (4, 4),
    (8, 1),
    (8, 4),
    (16, 1),
    (16, 2),
    (16, 4),
    (16, 8),
    (32, 1),
]
CHUNKS = (128, 256, 512)


@torch.inference_mode()
def measure(target: Target, segments: list[Segment], wanted: list[int], repeats: int) -> list[float]:
    """Median milliseconds of a pass and of each kind of work in it."""
    cache = target.make_cache(len(segments), segments[0].end)
    tokens = [7] * sum(segment.length for segment in segments)
    phases = torch.zeros(len(PHASES), dtype=torch.float64)
    if isinstance(target, NativeTarget):
        target.decoder.phases = phases
    passes = []
    for _ in range(repeats + 1):
        phases.zero_()
        began = time.perf_counter()
        target.forward(cache, segments, tokens, wanted).choices.tolist()
        seconds = time.perf_counter() - began
        passes.append([seconds, *phases.tolist(), seconds - float(phases.sum())])
    return [1000 * statistics.median(values) for values in zip(*passes[1:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=832, help="tokens of each sequence, those of the step included")
    parser.add_argument("--repeats", type=int, default=15)
    wanted = parser.parse_args()
    target = load_configured(load_settings())
    print(f"{target.identity}, {torch.get_num_threads()} threads, {wanted.context} tokens of context; milliseconds\n")
    print(f"| step | whole | {' | '.join(PHASES)} | left |\n|{' --- |' * (len(PHASES) + 3)}")
    for batch, width in SHAPES:
        segments = [Segment(slot, wanted.context - width, width) for slot in range(batch)]
        row = measure(target, segments, list(range(batch * width)), wanted.repeats)
        print(f"| {batch} x {width} | {' | '.join(f'{value:.2f}' for value in row)} |", flush=True)
    for rows in CHUNKS:
        row = measure(target, [Segment(0, 0, rows)], [rows - 1], wanted.repeats)
        print(f"| prompt of {rows} | {' | '.join(f'{value:.2f}' for value in row)} |", flush=True)


if __name__ == "__main__":
    main()
