"""`ragspec head data`: the target writes the text that its head is trained on."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from ragspec.errors import InputError
from ragspec.heads.recording import Recording, record
from ragspec.heads.replay import Written, replay
from ragspec.heads.store import AnswerWriter, DataCard
from ragspec.heads.texts import PromptName, Topic, TopicTexts, read_topics
from ragspec.prompt import PromptBuilder

#: Told after every answer: kind of text, answers so far of it, tokens so far in all.
Progress = Callable[[str, int, int], None]
#: Sequences decoded together: no user waits, so as many as still make a step cheaper a token.
BATCH = 64
#: Topics whose texts are written before their questions are answered.
_ROUND = 256


def write_topic_answers(
    target: Target,
    folder: Path,
    *,
    topics: int = 0,
    among: Sequence[Topic] | None = None,
    seed: int = 0,
    window: int = 1536,
    progress: Progress | None = None,
) -> int:
    """Have the target write about the built-in topics and answer questions about them; returns the tokens written.

    What the folder has an answer for is not asked again, so that a run which was stopped goes on.

    Args:
        target: who writes.
        folder: for the answers.
        topics: how many topics; 0 for all.
        among: which they are drawn from; None for all that are built in.
        seed: of everything random.
        window: tokens of prompt and answer.
        progress: told of every answer.

    Raises:
        InputError: no prompt fits the window (code `no_head_data`).
    """
    card = DataCard(target.identity, target.hidden_size, "the target's own texts about built-in topics", seed)
    writer = AnswerWriter(folder, card)
    builder = PromptBuilder(target.tokenizer, window)
    known = read_topics() if among is None else among
    drawn = random.Random(seed).sample(known, min(topics or len(known), len(known)))  # noqa: S311 - nothing secret
    answers = 0
    with writer:
        for start in range(0, len(drawn), _ROUND):
            plan = TopicTexts(target.tokenizer, builder, drawn[start : start + _ROUND], seed + start)
            texts = dict(sorted(_run(target, plan.texts(), writer, window, progress)))
            answers += len(texts) + _exhaust(_run(target, plan.answers(texts), writer, window, progress))
    _require(answers, window)
    return writer.written


def write_answers(
    target: Target,
    folder: Path,
    requests: Iterable[Request],
    *,
    source: str,
    window: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Have the target answer those requests for which the folder has no answer; returns the tokens written.

    Raises:
        InputError: there is no request, or none fits the window (code `no_head_data`).
    """
    writer = AnswerWriter(folder, DataCard(target.identity, target.hidden_size, source, seed))
    with writer:
        answers = _exhaust(_run(target, requests, writer, window, progress))
    _require(answers, window)
    return writer.written


def write_job_answers(
    target: Target,
    folder: Path,
    answers: Iterable[Written],
    *,
    source: str,
    window: int,
    progress: Progress | None = None,
) -> int:
    """Keep answers that the target wrote in jobs, with the states behind them; returns the tokens written.

    An answer that the folder has already is passed over.
    """
    writer = AnswerWriter(folder, DataCard(target.identity, target.hidden_size, source, seed=0))
    prompts: dict[str, str] = {}

    def unknown() -> Iterator[Written]:
        for answer in answers:
            prompt = _fingerprint(answer.prompt, answer.tokens)
            if writer.text_of(prompt) is None:
                prompts[answer.request_id] = prompt
                yield answer

    with writer:
        for number, recording in enumerate(replay(target, unknown(), window), start=1):
            kind = _add(writer, recording, prompts.pop(recording.request_id))
            if progress is not None:
                progress(kind, number, writer.written)
    return writer.written


def _run(
    target: Target, requests: Iterable[Request], writer: AnswerWriter, window: int, progress: Progress | None
) -> Iterator[tuple[int, str]]:
    """Answer and write what the folder has no answer for, each prompt once, and give every request's number and answer."""
    counts: Counter[str] = Counter()
    found: list[tuple[int, str]] = []
    prompts: dict[str, str] = {}
    asked: set[str] = set()

    def unanswered() -> Iterator[Request]:
        for request in requests:
            prompt = _fingerprint(request.prompt, _changed(request.sampling))
            if prompt in asked or writer.text_of(prompt) is not None:
                found.append((PromptName.parse(request.id).number, prompt))
            else:
                asked.add(prompt)
                prompts[request.id] = prompt
                yield request

    for recording in record(target, unanswered(), batch=BATCH, window=window):
        kind = _add(writer, recording, prompts.pop(recording.request_id))
        counts[kind] += 1
        if progress is not None:
            progress(kind, counts[kind], writer.written)
        yield PromptName.parse(recording.request_id).number, recording.text
    for number, prompt in found:
        text = writer.text_of(prompt)
        if text is not None:  # what was asked in this run may have got no answer
            yield number, text


def _add(writer: AnswerWriter, recording: Recording, prompt: str) -> str:
    """Write an answer; returns its kind."""
    name = PromptName.parse(recording.request_id)
    writer.add(
        name.kind,
        name.key,
        recording.tokens,
        recording.hidden,
        prompt=prompt,
        prompt_tokens=recording.prompt,
        text=recording.text,
    )
    return name.kind


def _fingerprint(*asked: object) -> str:
    """SHA-256 of what is asked and how, as canonical JSON: the same twice has the same answer."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _changed(sampling: Sampling) -> dict[str, object]:
    """The options that are not as by default: one that is added later leaves the fingerprints of what lacks it as they are."""
    values = {field.name: (getattr(sampling, field.name), field.default) for field in fields(sampling)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _exhaust(running: Iterator[object]) -> int:
    """Run to the end; returns how many came."""
    return sum(1 for _ in running)


def _require(answers: int, window: int) -> None:
    """Refuse a run that neither wrote an answer nor found one in the folder."""
    if not answers:
        raise InputError(
            f"No prompt was answered: there is none, or none that fits the window of {window} tokens.",
            "Give other questions or fewer passages, or raise RAGSPEC_CONTEXT_WINDOW.",
            code="no_head_data",
        )
