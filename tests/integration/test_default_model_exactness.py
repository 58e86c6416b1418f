"""The default model writes through the engine what transformers' own `generate` writes, over real RAG prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from ragspec.assembly import make_engine
from ragspec.decoding.acceptance import Source
from ragspec.decoding.engine import Engine
from ragspec.decoding.loading import load_configured
from ragspec.decoding.request import Completion, Request, Sampling
from ragspec.decoding.step_cost import FREE
from ragspec.decoding.target import Target
from ragspec.demo.prompts import demo_prompts
from ragspec.prompt import PromptBuilder
from ragspec.settings import load_settings

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = 40
MAX_TOKENS = 12
#: Two steps of bfloat16 between 16 and 32, where this model's top logits lie.
ROUNDING = 0.25


def rag_requests(target: Target) -> list[Request]:
    """Forty questions over CPython's language reference, three passages each."""
    builder = PromptBuilder(target.tokenizer, 2048)
    prompts = demo_prompts(builder, MAX_TOKENS, passage_chars=200)[:PROMPTS]
    return [
        Request(str(i), p.token_ids, Sampling(max_tokens=MAX_TOKENS), p.passage_spans) for i, p in enumerate(prompts)
    ]


def decode_together(target: Target, requests: Sequence[Request]) -> list[Completion]:
    engine = Engine(target, max_batch=8, prefill_chunk=200)
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_work:
        for completion in engine.step():
            done[completion.request_id] = completion
    return [done[request.id] for request in requests]


def generate(model: PreTrainedModel, request: Request) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens of transformers' greedy `generate`, and the logits it chose each from."""
    prompt = torch.tensor([request.prompt])
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, prompt.shape[1] :].tolist(), [logits[0].float() for logits in out.logits]


def load(precision: str) -> Target:
    return load_configured(load_settings(device="cpu", precision=precision))


def test_in_float32_every_token_is_generates() -> None:
    target = load("float32")
    requests = rag_requests(target)
    done = decode_together(target, requests)
    target.model.set_attn_implementation("sdpa")

    expected = [generate(target.model, request)[0] for request in requests]

    assert len(requests) == PROMPTS
    assert [list(completion.acceptance.token_ids) for completion in done] == expected
    assert sum(completion.acceptance.num_accepted_draft_tokens for completion in done) > PROMPTS


def test_in_bfloat16_every_parting_is_a_near_tie(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the two part, `generate`'s own logits of both choices lie within rounding; the gaps are printed."""
    target = load("bfloat16")
    requests = rag_requests(target)
    done = decode_together(target, requests)
    target.model.set_attn_implementation("sdpa")

    gaps = []
    for request, completion in zip(requests, done, strict=True):
        ours = completion.acceptance.token_ids
        theirs, logits = generate(target.model, request)
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if place is None:
            assert len(ours) == len(theirs)
        else:
            gaps.append(float(logits[place][theirs[place]] - logits[place][ours[place]]))
    with capsys.disabled():
        print(f"\nbfloat16: {len(gaps)} of {PROMPTS} answers part, at gaps {sorted(gaps)}")

    assert all(0 <= gap <= ROUNDING for gap in gaps)


def test_in_int8_no_answer_depends_on_batch_or_drafts() -> None:
    """Tokens and log-probabilities of the model in a full batch with drafts are those of each prompt alone and without."""
    target = load("int8")
    requests = rag_requests(target)
    together = decode_together(target, requests)
    assert target.precision == "int8"
    plain = Engine(target, max_batch=1, max_draft=0, prefix_cache=0)

    alone = []
    for request in requests:
        plain.add(request)
        while plain.has_work:
            alone += plain.step()

    written = [[(c.acceptance.token_ids, c.acceptance.token_logprobs) for c in done] for done in (together, alone)]
    assert written[0] == written[1]
    assert sum(completion.acceptance.num_accepted_draft_tokens for completion in together) > PROMPTS


def test_the_engine_of_a_worker_drafts_with_lookup_and_the_shipped_head() -> None:
    """From settings: with the head, without it and without drafts the same is written, and others have proposed it."""
    target = load("int8")
    written, proposers = [], []
    for options in ({}, {"head": "none"}, {"max_draft": 0}):
        settings = load_settings(device="cpu", precision="int8", **options)
        engine = make_engine(settings, target, max_batch=1, prefix_cache=0.0, step_profile=FREE)
        done = []
        for request in rag_requests(target)[:8]:
            engine.add(request)
            while engine.has_work:
                done += engine.step()
        written.append([completion.acceptance.token_ids for completion in done])
        proposers.append({source for completion in done for source in completion.acceptance.token_sources})

    assert written[0] == written[1] == written[2]
    assert proposers[0] >= {Source.HEAD, Source.PASSAGE, Source.TARGET}
    assert Source.HEAD not in proposers[1]
    assert Source.PASSAGE in proposers[1]
    assert proposers[2] == {Source.TARGET}
