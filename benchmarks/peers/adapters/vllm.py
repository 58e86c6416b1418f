"""vLLM's CPU backend, in bfloat16 with prefix caching.

Its CPU guide's advice is followed: room for keys and values by VLLM_CPU_KVCACHE_SPACE, threads bound to cores, Intel's OpenMP
preloaded. Compiled by inductor, its default (`enforce_eager` off).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.protocol import Load, Prompt, Ready, Run, serve

#: Draft length and longest n-gram of the example in its documentation of n-gram speculation; from 2 tokens on, as its own
#: default of 5 finds next to nothing in answers this short.
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
#: Tokens of a step: the chunk in which prompts go in beside the tokens that decode.
BATCHED_TOKENS = 2048
#: Tokens of a cache block. Whole blocks are what its prefix cache shares, and its default on CPU, 128, is longer than many a
#: passage: with 32 (it wants multiples of that) prompts that share passages were answered 1.15 times as fast, others as fast.
BLOCK_SIZE = 32


class Vllm:
    """Options: `lookup`, default false: n-gram speculation."""

    def __init__(self, load: Load) -> None:
        cores = sorted(os.sched_getaffinity(0))[: load.threads]
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(load.cache_gb)
        # All cores: left alone it keeps one of them for its scheduler, half of a machine of two.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.exists():  # the worker is a process of its own and loads it
            os.environ["LD_PRELOAD"] = str(openmp)
        from vllm import LLM, SamplingParams

        self._llm = LLM(
            model=load.folder,
            dtype="bfloat16",
            max_model_len=load.window,
            max_num_seqs=load.concurrency,
            max_num_batched_tokens=max(BATCHED_TOKENS, load.window),
            enable_prefix_caching=True,
            block_size=BLOCK_SIZE,
            speculative_config=NGRAM if load.options.get("lookup") else None,
        )
        self._sampling = SamplingParams
        self._load = load
        self.ready = Ready({"vllm": version("vllm-cpu"), "torch": version("torch")}, "bfloat16")

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """All at once, its scheduler holding the batch; at concurrency 1 one after another."""
        sampling = self._sampling(temperature=0.0, max_tokens=max_tokens, stop_token_ids=list(self._load.end_tokens))
        given = [{"prompt_token_ids": list(prompt.tokens)} for prompt in prompts]
        groups = [[one] for one in given] if self._load.concurrency == 1 else [given]
        done = [out for group in groups for out in self._llm.generate(group, sampling, use_tqdm=False)]
        return Run(
            [out.outputs[0].token_ids for out in done],
            [len(out.prompt_token_ids) for out in done],
            sum(out.num_cached_tokens or 0 for out in done),
        )


if __name__ == "__main__":
    serve(Vllm)
