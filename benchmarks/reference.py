"""What the engine is compared with: transformers' `generate` and its continuous batching, on token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

Tokens = tuple[int, ...]
#: An end token that no model writes.
NO_TOKEN = 2**30
#: Tokens of a page of the paged cache on CPU, where the default of 256 wastes most of a short answer's last page.
PAGE = 32
#: Prompt tokens of a step on CPU, where no free memory of a card says how many are meant.
BATCH_TOKENS = 512


@torch.inference_mode()
def generate(
    model: Any, prompts: Sequence[Tokens], max_tokens: int, end: list[int], lookup: int | None = None
) -> list[Tokens]:
    """What `generate` writes greedily, prompts padded on the left; padding behind an end token is cut off.

    Args:
        model: a transformers causal LM.
        prompts: token ids.
        max_tokens: most tokens of an answer.
        end: end tokens.
        lookup: draft length of prompt lookup, for one prompt only; None for none.
    """
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    config = _config(max_tokens, end, lookup)
    out = model.generate(tokens.to(model.device), attention_mask=mask.to(model.device), generation_config=config)
    rows = [tuple(row[longest:].tolist()) for row in out]
    stops = [next((i + 1 for i, token in enumerate(row) if token in end), len(row)) for row in rows]
    return [row[:stop] for row, stop in zip(rows, stops, strict=True)]


@contextmanager
def continuous(model: Any, batch: int, window: int) -> Iterator[Callable[[Sequence[Tokens], int], None]]:
    """Continuous batching, running: a call answers prompts with so many tokens each, whatever they are.

    On CUDA it sizes its cache by the memory that is free; on CPU it has to be told.

    Args:
        model: a transformers causal LM.
        batch: answers decoded together.
        window: tokens that the longest prompt and its answer take.
    """
    sizes: dict[str, Any] = {}
    if model.device.type != "cuda":
        sizes = {"page_size": PAGE, "num_blocks": batch * (window // PAGE + 2), "max_batch_tokens": BATCH_TOKENS}
    with model.continuous_batching_context_manager(
        generation_config=_config(window, [NO_TOKEN], None),
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=batch, **sizes),
    ) as manager:

        def answer(prompts: Sequence[Tokens], max_tokens: int) -> None:
            waiting = set(manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=max_tokens))
            while waiting:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    waiting.discard(result.request_id)
                elif not manager.is_running():
                    msg = "transformers' continuous batching stopped"
                    raise RuntimeError(msg)

        yield answer


def _config(max_tokens: int, end: list[int], lookup: int | None) -> Any:
    return GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it without types
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=0,
        prompt_lookup_num_tokens=lookup,
    )
