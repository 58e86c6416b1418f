"""OpenVINO GenAI's continuous batching pipeline over the GGUF file, with prefix caching.

The weights stay in the four bits they are stored in and activations are quantised to eight for the matrix products, as it
does by default on CPU. Latency hint for a batch too: the throughput hint splits the cores among streams. Prompts are
split into chunks that ride along with decoding (`dynamic_split_fuse`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.protocol import Load, Prompt, Ready, Run, serve

#: Draft length and longest n-gram of its prompt lookup sample.
ASSISTANT_TOKENS = 5
NGRAM = 3
#: Tokens of a step; its own default.
BATCHED_TOKENS = 256


class OpenVino:
    """Options: `lookup`, default false: prompt lookup."""

    def __init__(self, load: Load) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = load.cache_gb
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = load.concurrency
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": load.threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._lookup = bool(load.options.get("lookup"))
        if self._lookup:
            properties["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(load.gguf, scheduler, "CPU", properties)
        self._load = load
        self._added = 0
        versions = {"openvino-genai": version("openvino-genai"), "openvino": version("openvino")}
        self.ready = Ready(versions, "GGUF Q4_1, int8 activations")

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """As many requests in the pipeline as it may decode together; the next goes in as one comes out.

        Not all at once by its `generate`: it looks for cached prefixes when a request is added, and would find none.
        """
        config = self._config(max_tokens)
        outputs: dict[int, list[int]] = {}
        lengths: dict[int, int] = {}
        running: dict[int, Any] = {}
        waiting = deque(enumerate(prompts))
        while waiting or running:
            while waiting and len(running) < self._load.concurrency:
                place, prompt = waiting.popleft()
                tokens = ov.Tensor(np.array([prompt.tokens], dtype=np.int64))
                running[place] = self._pipeline.add_request(self._added, tokens, config)
                self._added += 1
            self._pipeline.step()
            for place, handle in list(running.items()):
                status = handle.get_status()
                if status == genai.GenerationStatus.RUNNING:
                    continue
                if status != genai.GenerationStatus.FINISHED:
                    msg = f"prompt {place + 1} ended as {status.name}"
                    raise RuntimeError(msg)
                outputs[place] = running.pop(place).read_all()[0].generated_ids
                lengths[place] = handle.get_perf_metrics().get_num_input_tokens()
        order = range(len(prompts))
        return Run([outputs[place] for place in order], [lengths[place] for place in order])

    def _config(self, max_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.stop_token_ids = set(self._load.end_tokens)
        if self._lookup:
            config.num_assistant_tokens = ASSISTANT_TOKENS
            config.max_ngram_size = NGRAM
        return config


if __name__ == "__main__":
    serve(OpenVino)
