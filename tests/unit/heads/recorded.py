"""A small model's answers, recorded once for all tests of heads."""

from __future__ import annotations

import torch

from ragspec.decoding.request import Request, Sampling
from ragspec.heads.training import Recipe

RECIPE = Recipe(inner=64, draft_tokens=40, depth=3, epochs=3, batch=64, learning_rate=5e-3, patience=5)
WINDOW = 64
ANSWERS = 400


def requests(number: int) -> list[Request]:
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(0, 38, (number, 12), generator=generator).tolist()
    return [Request(f"rag-{i}-{i}", tuple(prompt), Sampling(max_tokens=40)) for i, prompt in enumerate(prompts)]
