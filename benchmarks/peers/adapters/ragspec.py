"""ragspec's own engine, with the settings that a worker would start with (RAGSPEC_* variables count)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.protocol import Load, Prompt, Ready, Run, serve
from ragspec.assembly import make_engine
from ragspec.corpus.passage import Passage
from ragspec.decoding.loading import load_target
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.jobs.answer import Question
from ragspec.jobs.options import AnswerOptions
from ragspec.settings import load_settings
from worker.resident.feed import Feed
from worker.resident.preparation import Prepared
from worker.resident.ticket import issue
from worker.shard import WINDOW_BATCHES


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the feed sees it (`worker.resident.parts.BuiltPrompt`)."""

    token_ids: tuple[int, ...]
    passage_spans: tuple[tuple[int, int], ...]
    used: tuple[Passage, ...] = ()


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
        self._concurrency = load.concurrency
        # A worker lets its engine hold so many questions of a shard at most.
        self._shard_size = min(settings.shard_size, WINDOW_BATCHES * load.concurrency)
        self._shards_in_flight = settings.bulk_concurrency
        self._speculation = bool(load.options.get("speculation", True))
        self._jobs = 0
        versions = {name: version(name) for name in ("torch", "transformers")}
        self.ready = Ready(versions, target.precision)

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """One job, as a file of questions is.

        At concurrency 1 a prompt is handed over when the answer before is there, in the order of the file; else as a worker
        does it, those that begin alike one behind the other.
        """
        sampling = Sampling(max_tokens=max_tokens, speculation=self._speculation)
        self._jobs += 1
        requests = [
            Request(str(i), prompt.tokens, sampling, prompt.passages, group=f"job {self._jobs}")
            for i, prompt in enumerate(prompts)
        ]
        done = self._one_by_one(requests) if self._concurrency == 1 else self._together(requests)
        ordered = [done[request.id] for request in requests]
        return Run(
            [completion.acceptance.token_ids for completion in ordered],
            [completion.prompt_tokens for completion in ordered],
            sum(completion.cached_prompt_tokens for completion in ordered),
        )

    def _one_by_one(self, requests: Sequence[Request]) -> dict[str, Completion]:
        done: dict[str, Completion] = {}
        for request in requests:
            self._engine.add(request)
            while self._engine.has_work:
                done |= {completion.request_id: completion for completion in self._engine.step()}
        return done

    def _together(self, requests: Sequence[Request]) -> dict[str, Completion]:
        """What `worker.resident.pipeline.Pipeline` does with retrieved questions: shards of them, some in flight at once."""
        done: dict[str, Completion] = {}
        capacity = 2 * self._concurrency
        feed = Feed(group_limit=capacity)
        options = AnswerOptions(collection="rendered")
        shards = deque(requests[i : i + self._shard_size] for i in range(0, len(requests), self._shard_size))
        in_flight: dict[int, Sequence[Request]] = dict.fromkeys(range(self._shards_in_flight), ())
        taken = 0
        while len(done) < len(requests):
            for connection, shard in in_flight.items():
                if shards and all(request.id in done for request in shard):
                    in_flight[connection] = shards.popleft()
                    for request in in_flight[connection]:
                        question = Question(int(request.id), request.id, "")
                        ticket = issue(question.idx, connection, question, options, 0.0)
                        feed.put(Prepared(ticket, Rendered(request.prompt, request.passage_spans), 0.0))
            ready = feed.take(capacity - (taken - len(done)))
            taken += len(ready)
            for prepared in ready:
                self._engine.add(requests[int(prepared.ticket.id)])
            done |= {completion.request_id: completion for completion in self._engine.step()}
        return done


if __name__ == "__main__":
    serve(Ragspec)
