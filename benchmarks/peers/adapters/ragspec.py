"""ragspec's own engine, with the settings that a worker would start with (RAGSPEC_* variables count)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.protocol import Load, Prompt, Ready, Run, serve
from ragspec.assembly import make_engine
from ragspec.decoding.loading import load_target
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.settings import load_settings


class Ragspec:
    """Options: `speculation`, default true."""

    def __init__(self, load: Load) -> None:
        settings = load_settings()
        target = load_target(
            Path(load.folder),
            settings.device,
            settings.precision,
            kernels=settings.kernels_folder,
            threads=load.threads,
            cuda_graphs=settings.cuda_graphs,
        )
        self._engine = make_engine(settings, target, max_batch=load.concurrency, context_window=load.window)
        self._one_by_one = load.concurrency == 1
        self._speculation = bool(load.options.get("speculation", True))
        self._asked = 0
        versions = {name: version(name) for name in ("torch", "transformers")}
        self.ready = Ready(versions, target.precision)

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """One job, as a file of questions is; at concurrency 1 a prompt is handed over when the answer before is there."""
        sampling = Sampling(max_tokens=max_tokens, speculation=self._speculation)
        done: dict[int, Completion] = {}
        first = self._asked
        for prompt in prompts:
            request = Request(str(self._asked), prompt.tokens, sampling, prompt.passages, group=f"from {first}")
            self._engine.add(request)
            self._asked += 1
            if self._one_by_one:
                self._drain(done)
        self._drain(done)
        ordered = [done[i] for i in range(first, self._asked)]
        return Run(
            [completion.acceptance.token_ids for completion in ordered],
            [completion.prompt_tokens for completion in ordered],
            sum(completion.cached_prompt_tokens for completion in ordered),
        )

    def _drain(self, done: dict[int, Completion]) -> None:
        while self._engine.has_work:
            done |= {int(completion.request_id): completion for completion in self._engine.step()}


if __name__ == "__main__":
    serve(Ragspec)
