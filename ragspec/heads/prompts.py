"""Prompts to measure on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from ragspec.demo.prompts import demo_prompts
from ragspec.errors import InputError
from ragspec.heads.texts import chat_tokens
from ragspec.prompt import PromptBuilder

log = logging.getLogger(__name__)


def read_prompts(target: Target, path: Path | None, max_tokens: int, window: int) -> list[Request]:
    """Greedy requests out of a file of JSON Lines with a field `prompt`, or else the demo's questions with their passages.

    A prompt that leaves no room for its answer is left out, with a warning.

    Raises:
        InputError: a line is no such object, or no prompt is left; names the line (code `bad_prompts`).
    """
    sampling = Sampling(max_tokens=max_tokens)
    if path is None:
        prompts = demo_prompts(PromptBuilder(target.tokenizer, window), max_tokens)
        return [Request(str(i), p.token_ids, sampling, p.passage_spans) for i, p in enumerate(prompts)]
    texts = [_prompt(path, number, line) for number, line in enumerate(_lines(path), start=1) if line.strip()]
    encoded = [(str(i), chat_tokens(target.tokenizer, text)) for i, text in enumerate(texts)]
    requests = [
        Request(name, tokens, sampling, ((0, len(tokens)),))
        for name, tokens in encoded
        if len(tokens) + max_tokens <= window
    ]
    if len(requests) < len(texts):
        log.warning("%d of %d prompts of %s leave no room for an answer", len(texts) - len(requests), len(texts), path)
    if not requests:
        msg = f"{path} has no prompt that fits a window of {window} tokens."
        raise InputError(
            msg, "Give JSON Lines with a field `prompt`, or raise RAGSPEC_CONTEXT_WINDOW.", code="bad_prompts"
        )
    return requests


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise InputError(msg, "Give a UTF-8 file.", code="bad_prompts") from error


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"Line {number} of {path} is no JSON object with a field `prompt`."
        raise InputError(msg, 'Write lines such as {"prompt": "..."}.', code="bad_prompts") from error
    return str(prompt)
