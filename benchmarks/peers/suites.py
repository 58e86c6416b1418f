"""The prompts of each suite: rendered and encoded once, with the target's tokenizer, so that all peers get the same tokens."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.protocol import Prompt
from ragspec.corpus.jsonl import BadLine, read_passages
from ragspec.corpus.passage import Passage
from ragspec.demo.prompts import demo_prompts
from ragspec.errors import InputError
from ragspec.prompt import PromptBuilder
from ragspec.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Passages of a prompt.
TOP_K = 3


def specbench_rag(tokenizer: PreTrainedTokenizerBase, window: int, path: Path | None, max_tokens: int) -> list[Prompt]:
    """A file of complete prompts (`prompt`), each a user's message; without a file, the demo's questions.

    Raises:
        InputError: a row without a `prompt`.
    """
    if path is None:
        return _demo(tokenizer, window, max_tokens)
    prompts = []
    for row in _rows(path, "prompt"):
        messages = [{"role": "user", "content": row["prompt"]}]
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        prompts.append(Prompt(tuple(tokenizer(text, add_special_tokens=False)["input_ids"])))
    return [prompt for prompt in prompts if len(prompt.tokens) + max_tokens <= window]


def bulk_rag(
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    window: int,
    files: tuple[Path, Path] | None,
    max_tokens: int,
    limit: int,
) -> list[Prompt]:
    """Questions over a corpus: the best passages found once, prompts as a worker would write them, in the file's order.

    Args:
        tokenizer: the target's.
        settings: name the embedder, the prompt template and the order of passages.
        window: tokens of a prompt and its answer.
        files: passages (`id`, `text`) and questions (`question`), JSON Lines; None for the demo's.
        max_tokens: most tokens of an answer.
        limit: questions used, 0 for all.

    Raises:
        InputError: a row that is none.
        ModelUnavailableError: no embedder.
    """
    if files is None:
        return _demo(tokenizer, window, max_tokens)
    import numpy as np

    from ragspec.corpus.embedder import load_embedder

    passages = []
    for row in read_passages(files[0]):
        if isinstance(row, BadLine):
            raise row.error
        passages.append(row)
    questions = [row["question"] for row in _rows(files[1], "question")][: limit or None]
    embedder = load_embedder(settings)
    scores = embedder.embed(questions) @ embedder.embed([p.text for p in passages], "passage").T
    best = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
    builder = PromptBuilder(tokenizer, window, settings.prompt_template, settings.passage_order)
    prompts = []
    for number, (question, places) in enumerate(zip(questions, best, strict=True)):
        found = [
            Passage(passages[i].id, passages[i].text, float(scores[number, i]), passages[i].id, passages[i].title)
            for i in places
        ]
        built = builder.build(question, found, max_tokens)
        prompts.append(Prompt(built.token_ids, built.passage_spans))
    return prompts


def warm_up(tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts of the suite's lengths that share no prefix with it, nor with one another: its words in reverse."""
    warm = []
    for prompt in prompts[:count]:
        words = str(tokenizer.decode(list(prompt.tokens))).split()
        tokens = tokenizer(" ".join(reversed(words)), add_special_tokens=False)["input_ids"]
        warm.append(Prompt(tuple(tokens[: len(prompt.tokens)])))
    return warm


def shared_tokens(prompts: list[Prompt]) -> int:
    """Prompt tokens that begin a prompt as another one began before: all that an exact prefix cache can ever serve.

    The distinct beginnings are the nodes of a trie, and of two neighbours in sorted order the second adds those beyond what
    it has in common with the first; so the order in which the prompts come does not matter.
    """
    ordered = sorted(prompt.tokens for prompt in prompts)
    return sum(_common(a, b) for a, b in itertools.pairwise(ordered))


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _demo(tokenizer: PreTrainedTokenizerBase, window: int, max_tokens: int) -> list[Prompt]:
    built = demo_prompts(PromptBuilder(tokenizer, window), max_tokens)
    return [Prompt(prompt.token_ids, prompt.passage_spans) for prompt in built]


def _rows(path: Path, field: str) -> list[dict[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON Lines: {error}.") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise InputError(f"Row {number} of {path} has no text in `{field}`.")
    return rows
