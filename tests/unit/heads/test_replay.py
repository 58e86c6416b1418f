"""Text that was written before gives the states that it was written from, and only text whose prompt is known is used."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from ragspec.heads import replay as replaying
from ragspec.heads.data import write_job_answers
from ragspec.heads.job_text import FAILED, OTHER_MODEL, OTHER_PROMPT, OTHER_TEMPLATE, JobText
from ragspec.heads.recording import Recording, record
from ragspec.heads.replay import Written, replay
from ragspec.heads.store import answer_files, read_answers
from ragspec.jobs.answer import Answer
from ragspec.prompt import PromptBuilder
from tests import tiny

WINDOW = 64
PASSAGE = {"id": "p", "document": "d", "title": "T", "score": 0.5, "text": "there it is", "metadata": {"page": 1}}


def recorded(target: Target) -> list[tuple[Request, Recording]]:
    """Answers to prompts that share beginnings, and their states as they came."""
    generator = torch.Generator().manual_seed(2)
    beginning = tuple(torch.randint(0, 38, (20,), generator=generator).tolist())
    requests = {}
    for i in range(12):
        own = tuple(torch.randint(0, 38, (1 + i,), generator=generator).tolist())
        requests[f"rag-{i}-{i}"] = Request(f"rag-{i}-{i}", beginning[: 3 * (i % 5)] + own, Sampling(max_tokens=1 + i))
    return [(requests[one.request_id], one) for one in record(target, requests.values(), batch=4, window=WINDOW)]


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_reading_gives_the_states_that_writing_gave(
    precision: str, chunk: int, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was read before, and however the prompt is cut."""
    monkeypatch.setattr(replaying, "CHUNK", chunk)
    target: Target = tiny.int8(kernels) if precision == "int8" else tiny.smallest()
    pairs = recorded(target)
    assert len(pairs) == 12

    pairs = [pair for pair in pairs for _ in range(2)]  # the same prompt again has states all the same
    read = list(replay(target, [Written(r.id, r.prompt, one.tokens, one.text) for r, one in pairs], WINDOW))

    for (_, expected), found in zip(pairs, read, strict=True):
        assert (found.request_id, found.prompt) == (expected.request_id, expected.prompt)
        assert (found.tokens, found.text) == (expected.tokens, expected.text)
        if precision == "int8":
            assert torch.equal(found.hidden, expected.hidden)
        else:
            torch.testing.assert_close(found.hidden, expected.hidden, atol=0.02, rtol=0.02)


def test_what_does_not_fit_is_left_out() -> None:
    texts = [Written("a", (1,) * WINDOW, (2, 3), ""), Written("b", (1,) * (WINDOW - 1), (2, 3), "")]

    assert [one.request_id for one in replay(tiny.smallest(), texts, WINDOW)] == ["b"]


@pytest.fixture
def builder() -> PromptBuilder:
    return PromptBuilder(tiny.target().tokenizer, 512)


def answer(builder: PromptBuilder, idx: int, question: str) -> Answer:
    from ragspec.corpus.passage import Passage

    prompt = builder.build(question, [Passage(**PASSAGE)], 32)
    return Answer(
        idx=idx,
        status="completed",
        text="it is",
        model="tiny@0+float32",
        template_hash=builder.template_hash,
        prompt_tokens=len(prompt.token_ids),
        completion_tokens=2,
        passages=[dict(PASSAGE)],
        token_ids=[5, 6],
    )


def test_answers_are_used_whose_prompt_is_known_to_the_token(builder: PromptBuilder) -> None:
    good = answer(builder, 0, "where?")
    answers = [
        ("a", "where?", good),
        ("b", "where?", replace(good, idx=1, status="failed", token_ids=[])),
        ("c", "where?", replace(good, idx=2, model="other@1+float32")),
        ("d", "where?", replace(good, idx=3, template_hash="0" * 16)),
        ("e", "where is it?", replace(good, idx=4)),
        ("f", "where?", replace(good, idx=5, model="tiny@0+int8")),
    ]
    text = JobText(answers, builder, "tiny@0+bfloat16")

    found = list(text)

    assert [written.request_id for written in found] == ["rag-0-where?", "rag-5-where?"]
    assert len(found[0].prompt) == good.prompt_tokens
    assert found[0].tokens == (5, 6)
    assert text.left_out == Counter({FAILED: 1, OTHER_MODEL: 1, OTHER_TEMPLATE: 1, OTHER_PROMPT: 1})


def test_a_jobs_answers_are_kept_once(tmp_path: Path) -> None:
    target = tiny.smallest()
    written = [Written(r.id, r.prompt, one.tokens, one.text) for r, one in recorded(target)]
    first = write_job_answers(target, tmp_path, written, source="a test", window=WINDOW)

    assert first == sum(len(one.tokens) for one in written)
    assert write_job_answers(target, tmp_path, written, source="a test", window=WINDOW) == 0
    (path,) = answer_files(tmp_path)
    answers = read_answers(path)
    assert answers.tokens.tolist() == [token for one in written for token in one.tokens]
    assert [tuple(answers.prompt(number).tolist()) for number in range(len(answers))] == [one.prompt for one in written]
