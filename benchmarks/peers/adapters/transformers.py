"""Hugging Face transformers: `generate`, with prompt lookup, in padded batches, and its continuous batching.

bfloat16, as the weights are stored. SDPA is the default attention, and the fastest that `generate` has on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.protocol import Load, Prompt, Ready, Run, serve

#: What the documentation of prompt lookup uses, and the best of 5, 10 and 20 on Spec-Bench's rag rows in its author's table
#: (github.com/apoorvumang/prompt-lookup-decoding).
LOOKUP_TOKENS = 10
#: Tokens of a page of its paged cache: small, so that sharing prefixes by whole pages finds most of what is shared.
PAGE = 32
#: Prompt tokens that one step of its continuous batching carries.
BATCH_TOKENS = 512


class Transformers:
    """Options: `mode`: plain, lookup, padded or continuous."""

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(load.folder, dtype=torch.bfloat16)
        self._load = load
        self._mode = load.options["mode"]
        self._end = list(load.end_tokens)
        self.ready = Ready({name: version(name) for name in ("torch", "transformers")}, "bfloat16")

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """Each mode as its documentation shows it."""
        if self._mode == "continuous":
            return self._continuous(prompts, max_tokens)
        if self._mode == "padded":
            return self._padded(prompts, max_tokens)
        extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self._mode == "lookup" else {}
        outputs = []
        for prompt in prompts:
            tokens = torch.tensor([prompt.tokens])
            out = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self._end,
                pad_token_id=self._end[0],
                **extra,
            )
            outputs.append(out[0, tokens.shape[1] :].tolist())
        return Run(outputs)

    def _padded(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """Prompts of like length together, as one would by hand, padded on the left."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), self._load.concurrency):
            members = order[start : start + self._load.concurrency]
            longest = max(len(prompts[i].tokens) for i in members)
            tokens = torch.full((len(members), longest), self._end[0])
            mask = torch.zeros_like(tokens)
            for row, i in enumerate(members):
                tokens[row, longest - len(prompts[i].tokens) :] = torch.tensor(prompts[i].tokens)
                mask[row, longest - len(prompts[i].tokens) :] = 1
            out = self._model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self._end,
                pad_token_id=self._end[0],
            )
            for row, i in enumerate(members):
                outputs[i] = out[row, longest:].tolist()
        return Run([_until(output, self._end) for output in outputs])

    def _continuous(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        done = self._model.generate_batch(
            [list(prompt.tokens) for prompt in prompts],
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it without types
                max_new_tokens=max_tokens, do_sample=False, eos_token_id=self._end, pad_token_id=self._end[0]
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                # Twice what the batch can hold: the other half keeps prefixes.
                num_blocks=2 * self._load.concurrency * (self._load.window // PAGE + 1),
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=self._load.concurrency,
            ),
            # Set up by the warm-up run, as a server would be by its first request.
            persistent_manager=True,
        )
        outputs = list(done.values())
        failed = [output.error for output in outputs if output.error]
        if failed:
            raise RuntimeError(failed[0])
        if len(outputs) != len(prompts):
            msg = f"answered {len(outputs)} of {len(prompts)} prompts"
            raise RuntimeError(msg)
        return Run([o.generated_tokens for o in outputs], [len(o.prompt_ids) for o in outputs])


def _until(output: list[int], end: list[int]) -> list[int]:
    """What stands before the first end token: the rest is padding."""
    return next((output[:place] for place, token in enumerate(output) if token in end), output)


if __name__ == "__main__":
    serve(Transformers)
