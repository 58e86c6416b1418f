"""Prompts that benchmarks decode."""

from __future__ import annotations

import json
from pathlib import Path

from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from ragspec.demo.prompts import demo_prompts
from ragspec.prompt import PromptBuilder


def read_prompts(target: Target, path: Path | None, max_tokens: int, window: int) -> list[Request]:
    """Greedy requests out of a file of JSON Lines with a field `prompt`, or else the demo's questions with their passages."""
    sampling = Sampling(max_tokens=max_tokens)
    if path is None:
        prompts = demo_prompts(PromptBuilder(target.tokenizer, window), max_tokens)
        return [Request(str(i), p.token_ids, sampling, p.passage_spans) for i, p in enumerate(prompts)]
    requests = []
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        messages = [{"role": "user", "content": json.loads(line)["prompt"]}]
        text = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = tuple(target.tokenizer(str(text), add_special_tokens=False)["input_ids"])
        requests.append(Request(str(i), tokens, sampling, ((0, len(tokens)),)))
    return requests
