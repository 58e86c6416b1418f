"""llama.cpp's own server code, in process, through the binary wheel xllamacpp, over the GGUF file.

One slot an answer decoded together, each with room for the longest prompt; prompt caching on, flash attention automatic,
threads for decoding and for batches alike: llama-server's defaults otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp

from benchmarks.peers.protocol import Load, Prompt, Ready, Run, serve

#: n-gram speculation copies what followed the last match of so many tokens, so many tokens long. Its own defaults, 12 and 48,
#: are made for code; these are those of prompt lookup elsewhere.
NGRAM = 3
DRAFT = 10


class LlamaCpp:
    """Options: `lookup`, default false: n-gram speculation."""

    def __init__(self, load: Load) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = load.gguf
        params.n_parallel = load.concurrency
        params.n_ctx = load.concurrency * load.window
        params.cpuparams.n_threads = load.threads
        params.cpuparams_batch.n_threads = load.threads
        params.cache_ram_mib = load.cache_gb * 1024
        params.n_threads_http = load.concurrency + 2
        if load.options.get("lookup"):
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            params.speculative.ngram_simple.size_n = NGRAM
            params.speculative.ngram_simple.size_m = DRAFT
        self._server = xllamacpp.Server(params)
        self._load = load
        self.ready = Ready({"xllamacpp": version("xllamacpp")}, "GGUF Q4_1, int8 activations")

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """As many requests in flight as there are slots."""

        def ask(prompt: Prompt) -> dict[str, Any]:
            # Over its own HTTP: the in-process call has the OpenAI shape, which gives text and no token ids.
            body = {
                "prompt": list(prompt.tokens),
                "n_predict": max_tokens,
                "temperature": 0.0,
                "cache_prompt": True,
                "return_tokens": True,
            }
            request = Request(f"{self._server.listening_address}/completion", json.dumps(body).encode())
            with urlopen(request) as response:
                answer: dict[str, Any] = json.load(response)
            return answer

        with ThreadPoolExecutor(self._load.concurrency) as pool:
            done = list(pool.map(ask, prompts))
        return Run(
            [answer["tokens"] for answer in done],
            [answer["tokens_evaluated"] for answer in done],
            sum(answer["timings"]["cache_n"] for answer in done),
        )


if __name__ == "__main__":
    serve(LlamaCpp)
