"""What Prometheus is told of the gateway. Labels are bounded: routes, statuses and sources, never ids or names of users."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ragspec.decoding.acceptance import Source
from ragspec.jobs.answer import Answer

#: Upper bounds in seconds: a cached question on a GPU takes tens of milliseconds, a long answer on two cores half a minute.
LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)


class GatewayMetrics:
    """The gateway's own registry; names are vLLM's where it has one, behind our prefix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.latency = Histogram(
            "rag_spec_request_latency_seconds",
            "From the request's head to the last byte of its answer.",
            ["route", "status"],
            buckets=LATENCIES,
            registry=self.registry,
        )
        self.running = Gauge(
            "rag_spec_questions_waiting", "Questions whose answers are waited for.", registry=self.registry
        )
        self._parts = {
            part: Histogram(f"rag_spec_{part}_seconds", text, buckets=LATENCIES, registry=self.registry)
            for part, text in (
                ("queue_time", "From a worker's taking the question to its first step, retrieval excluded."),
                ("retrieval_time", "Embedding and search."),
                ("prefill_time", "The prompt's own forward passes."),
                ("decode_time", "From an answer's first token to its last."),
            )
        }
        self._prompt = Counter("rag_spec_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._written = Counter(
            "rag_spec_generation_tokens", "Tokens of answers, by who proposed them.", ["source"], registry=self.registry
        )
        self._drafts = Counter(
            "rag_spec_spec_decode_num_draft_tokens", "Draft tokens that were verified.", registry=self.registry
        )
        self._accepted = Counter(
            "rag_spec_spec_decode_num_accepted_tokens",
            "Draft tokens that stood, by who proposed them.",
            ["source"],
            registry=self.registry,
        )
        self._steps = Counter(
            "rag_spec_verify_steps", "Forward passes of sequences behind their prompts.", registry=self.registry
        )
        self._length = Histogram(
            "rag_spec_mean_acceptance_length",
            "Tokens a verify step, of each answer.",
            buckets=LENGTHS,
            registry=self.registry,
        )

    def count(self, answer: Answer) -> None:
        """Add an answer."""
        milliseconds = (answer.queued_ms, answer.retrieval_ms, answer.prefill_ms, answer.decode_ms)
        for histogram, value in zip(self._parts.values(), milliseconds, strict=True):
            histogram.observe(value / 1000)
        self._prompt.inc(answer.prompt_tokens)
        self._drafts.inc(answer.num_draft_tokens)
        self._steps.inc(answer.num_verify_steps)
        if answer.num_verify_steps:
            self._length.observe(answer.mean_acceptance_length)
        for source in Source:
            if tokens := answer.token_sources.count(int(source)):
                self._written.labels(source.name.lower()).inc(tokens)
                if source is not Source.TARGET:
                    self._accepted.labels(source.name.lower()).inc(tokens)

    def page(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
