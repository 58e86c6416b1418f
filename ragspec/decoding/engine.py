"""The engine: continuous batching with speculative decoding over one target.

A request's way: `add` queues it; a step admits it, gives it a slot with the longest prefix that is cached, carries the rest
of its prompt through in chunks and draws its first token; from then on each step feeds its last token and a draft, and emits
what verification leaves standing. One forward pass a step serves them all. Not thread-safe: one thread calls `add`, `cancel`
and `step`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.decoding.acceptance import Source
from ragspec.decoding.attention import Segment
from ragspec.decoding.draft import Draft, Drafter, Standing, Stretch
from ragspec.decoding.drafting import DraftingPanel
from ragspec.decoding.logits import adjust, adjusts
from ragspec.decoding.lookup import JobDrafter, OwnTextDrafter
from ragspec.decoding.memory import reserve_slots
from ragspec.decoding.request import Completion, FinishReason, Fresh, Request
from ragspec.decoding.scheduler import PromptChunk, Scheduler
from ragspec.decoding.sequence import Emission, Sequence
from ragspec.decoding.slots import SlotPool
from ragspec.decoding.step_cost import FREE, StepCost, StepLoad, StepProfile
from ragspec.decoding.stopping import answer_text, holds_stop
from ragspec.decoding.target import StepOutput, Target
from ragspec.decoding.verification import Verdict, verify_greedy, verify_sampled
from ragspec.decoding.width import WidthController
from ragspec.errors import ConflictError, InputError

#: Below this, dividing logits by the temperature overflows; the distribution is the argmax by then (vLLM draws the same line).
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class _Turn:
    """One sequence's part in a step: its segment's tokens and which packed rows of logits are its own."""

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    draft: Draft
    first_row: int
    rows: int


class _Outcome(NamedTuple):
    """What a turn comes to: how much of its draft stands, and what its sequence takes of it."""

    turn: _Turn
    accepted: int
    emission: Emission


class Engine:
    """Decodes many requests together, exactly as the target alone would each.

    Args:
        target: the decoder.
        max_batch: sequences decoded together.
        context_window: tokens of prompt and answer; the target's own limit caps it.
        prefill_chunk: prompt tokens that one step carries along at most.
        max_draft: draft tokens per sequence and step at most; 0 decodes plainly.
        drafters: of drafts that promise the same, the earlier one's is taken, a costly one's last; default: lookup in the
            request's own text and in the answers of its group.
        prefix_cache: share of the free memory, 0 to 1, for slots that keep the prefixes of finished prompts; 0 computes
            every prompt in full.
        step_profile: what steps take, by which the width of drafts is chosen (`profile_steps`); without it every draft is
            verified whole, which loses time where drafts are poor or batches large.

    Raises:
        SettingsError: not even one slot fits the device's memory.
        ValueError: `prefill_chunk` is below 1: no prompt would ever be read.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_batch: int = 16,
        context_window: int = 2048,
        prefill_chunk: int = 512,
        max_draft: int = 10,
        drafters: Sequences[Drafter] | None = None,
        prefix_cache: float = 0.25,
        step_profile: StepProfile = FREE,
    ) -> None:
        if prefill_chunk < 1:
            msg = f"prefill_chunk is {prefill_chunk}; a step must carry at least one prompt token"
            raise ValueError(msg)
        self.target = target
        self.window = min(context_window, target.context_window)
        self.steps = 0
        #: What the last step added to the answers of requests with `stream`; those that finished with it are among them.
        self.fresh: list[Fresh] = []
        self._max_draft = max_draft
        self._panel = DraftingPanel(
            [OwnTextDrafter(), JobDrafter()] if drafters is None else drafters, target.vocabulary
        )
        caches, plan = reserve_slots(target, max_batch, self.window, prefix_cache, self._panel.readers)
        self._cache = caches.all[0]
        slots = SlotPool(caches, working=plan.working, keeping=plan.keeping, reuse=prefix_cache > 0)
        self._scheduler = Scheduler(slots, window=self.window, prefill_chunk=prefill_chunk)
        self._width = WidthController(self._panel, StepCost(step_profile))

    @property
    def waiting(self) -> int:
        """Requests that do not run."""
        return self._scheduler.waiting

    @property
    def running(self) -> int:
        """Requests that a step works on."""
        return len(self._scheduler.running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts that were begun."""
        return self._scheduler.prompt_tokens

    @property
    def prefix_hit_tokens(self) -> int:
        """Of these, the ones that were in the cache already and were not computed again."""
        return self._scheduler.prefix_hit_tokens

    @property
    def drafter_failures(self) -> int:
        """How often a drafter was taken out for a request."""
        return self._panel.failures

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InputError: the prompt is empty, leaves no room for an answer (code `prompt_too_long`), or it or the bias names
                a token outside the vocabulary.
            ConflictError: a request of this id waits or runs.
        """
        if not request.prompt:
            msg = "The prompt is empty."
            raise InputError(msg, "Give at least one prompt token.")
        if len(request.prompt) >= self.window:
            msg = f"The prompt has {len(request.prompt)} tokens; the window holds {self.window}."
            raise InputError(msg, "Shorten it or raise RAGSPEC_CONTEXT_WINDOW.", code="prompt_too_long")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.target.vocabulary:
            msg = f"The prompt has a token outside the vocabulary of {self.target.vocabulary}."
            raise InputError(msg, "Encode it with the target's own tokenizer.")
        outside = [token for token, _ in request.sampling.logit_bias if not 0 <= token < self.target.vocabulary]
        if outside:
            msg = f"logit_bias names token {outside[0]}; the vocabulary has {self.target.vocabulary}."
            raise InputError(msg, "Name tokens by their ids in the target's own tokenizer.", code="bad_option")
        if self._scheduler.knows(request.id):
            msg = f"Request {request.id} is already in the engine."
            raise ConflictError(msg, "Use an id of its own for each request.")
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request, wherever it is; it gives no completion. An unknown id is ignored."""
        if self._scheduler.remove(request_id) is not None:
            self._panel.end(request_id)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One forward pass over everything that runs; returns what finished.

        Where the pass raises, or the way to it (out of memory, a tokenizer in use, Ctrl-C), nothing is lost: the next step does
        its work again, and gives what had finished by then.
        """
        self.fresh = []
        if ended := self._scheduler.ended():
            return self._finish(ended)
        try:
            for sequence in self._scheduler.admit():
                if sequence.request.sampling.speculation and self._max_draft:
                    self._panel.begin(sequence.request)
            chunks = self._scheduler.prompt_chunks()
            decoding = self._scheduler.decoding()
            if not decoding and not chunks:
                return []
            drafts = self._drafts(decoding, sum(chunk.length for chunk in chunks))
            turns, output = self._forward(decoding, drafts, chunks)
            outcomes = self._settle(turns, output)
            self.steps += 1
            for turn, _, emission in outcomes:
                turn.sequence.take(emission)
        except BaseException:  # Ctrl-C too: whoever catches it may step on
            self._scheduler.withdraw()
            raise
        self.fresh = [
            _fresh(turn.sequence, emission)
            for turn, _, emission in outcomes
            if emission.tokens and turn.sequence.request.stream
        ]
        self._learn(outcomes, output.hidden)
        self._tell_readers(turns, output)
        return self._finish(self._scheduler.ended())

    def _drafts(self, decoding: list[Sequence], prompt_rows: int) -> dict[str, Draft]:
        if not self._max_draft or not decoding:
            return {}
        # The last token of an answer is the target's own, so a draft may fill all places but one.
        limits = {
            s.request.id: min(self._max_draft, s.remaining - 1) for s in decoding if s.request.sampling.speculation
        }
        if self._panel.readers:
            self._panel.locate({s.request.id: Standing(s.slot, s.cached) for s in decoding})
        context = sum(s.cached for s in decoding) / len(decoding)
        return self._width.draft(limits, StepLoad(len(decoding), context, prompt_rows))

    def _forward(
        self, decoding: list[Sequence], drafts: dict[str, Draft], chunks: list[PromptChunk]
    ) -> tuple[list[_Turn], StepOutput]:
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        turns: list[_Turn] = []
        for sequence in decoding:
            draft = drafts.get(sequence.request.id, Draft())
            fed = (sequence.tokens[-1], *draft.tokens)
            turns.append(_Turn(sequence, sequence.cached, fed, draft, len(rows), len(fed)))
            rows.extend(range(len(tokens), len(tokens) + len(fed)))
            segments.append(Segment(sequence.slot, sequence.cached, len(fed)))
            tokens.extend(fed)
        for chunk in chunks:
            sequence, fed = chunk.sequence, chunk.tokens
            wanted = 1 if chunk.gives_first_token else 0
            turns.append(_Turn(sequence, sequence.cached, fed, Draft(), len(rows), wanted))
            segments.append(Segment(sequence.slot, sequence.cached, chunk.length))
            tokens.extend(fed)
            rows.extend([len(tokens) - 1] * wanted)
        output = self.target.forward(
            self._cache, segments, tokens, rows, hidden=self._panel.wants_hidden, features=self._panel.features
        )
        return turns, output

    def _settle(self, turns: list[_Turn], output: StepOutput) -> list[_Outcome]:
        """Verify each turn's draft and work out what its sequence takes, so that taking it cannot fail; changes nothing."""
        choices = output.choices.tolist()
        verdicts = [self._verify(turn, output.logits, choices) if turn.rows else None for turn in turns]
        texts = [
            () if verdict is None else (*turn.draft.tokens[: verdict.accepted], verdict.following)
            for turn, verdict in zip(turns, verdicts, strict=True)
        ]
        logprobs = output.logprobs(
            [place for turn, tokens in zip(turns, texts, strict=True) for place in enumerate(tokens, turn.first_row)]
        )
        now = time.perf_counter()
        outcomes = []
        first = 0
        for turn, verdict, tokens in zip(turns, verdicts, texts, strict=True):
            if verdict is None:
                outcomes.append(_Outcome(turn, 0, Emission(len(turn.tokens))))
                continue
            own = logprobs[first : first + len(tokens)]
            first += len(tokens)
            count, reason = self._standing(turn.sequence, tokens, own)
            sources = (*turn.draft.sources[: verdict.accepted], Source.TARGET)
            prompt = turn.sequence.prefilling
            # Of a decoding one the fed token and the accepted drafts count from now on; the next step overwrites refused ones.
            cached = len(turn.tokens) if prompt else count
            verified = () if prompt else ((len(turn.draft.tokens), min(verdict.accepted, count)),)
            emission = Emission(cached, tokens[:count], sources[:count], own[:count], verified, reason, now)
            outcomes.append(_Outcome(turn, verdict.accepted, emission))
        return outcomes

    def _tell_readers(self, turns: list[_Turn], output: StepOutput) -> None:
        """Hand the features of what counts from now on to the drafters that read them."""
        if output.features is None:
            return
        stretches: list[Stretch] = []
        rows: list[int] = []
        offset = 0
        for turn in turns:
            sequence = turn.sequence
            following = sequence.text(turn.start + 1, sequence.cached + 1)
            stretches.append(Stretch(sequence.request.id, sequence.slot, turn.start, following))
            rows.extend(range(offset, offset + len(following)))
            offset += len(turn.tokens)
        self._panel.follow(stretches, output.features, rows)

    def _verify(self, turn: _Turn, logits: Tensor, choices: list[int]) -> Verdict:
        request, answer = turn.sequence.request, turn.sequence.tokens
        sampling = request.sampling
        rows = slice(turn.first_row, turn.first_row + turn.rows)
        scores, best = logits[rows], choices[rows]
        if adjusts(sampling, len(answer)):
            scores = adjust(scores, sampling, request.prompt, answer, turn.draft.tokens, self.target.eos_ids)
            best = scores.argmax(-1).tolist()
        if sampling.temperature < GREEDY_TEMPERATURE:
            return verify_greedy(best, turn.draft)
        return verify_sampled(scores, turn.draft, sampling, len(answer))

    def _standing(
        self, sequence: Sequence, tokens: Sequences[int], logprobs: Sequences[float]
    ) -> tuple[int, FinishReason | None]:
        """How many verified tokens the answer takes, looked at one by one, and why it ends with them if it does."""
        sampling, ends, room = sequence.request.sampling, self.target.eos_ids, sequence.remaining
        answer = [*sequence.tokens] if sampling.stop else []
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), 1):
            if not math.isfinite(logprob):
                return count - 1, "error"
            if token in ends:
                return count, "stop"
            if sampling.stop:
                answer.append(token)
                if holds_stop(self.target.tokenizer, answer, sampling.stop, sampling.min_tokens):
                    return count, "stop_string"
            if count == room:
                return count, "length"
        return len(tokens), None

    def _learn(self, outcomes: list[_Outcome], hidden: Tensor | None) -> None:
        """Tell what drafts are made of and weighed by; where this is interrupted, drafts are worse and answers the same."""
        for turn, accepted, emission in outcomes:
            if not turn.rows:
                continue
            request, tokens = turn.sequence.request, emission.tokens
            self._width.record(request.id, turn.draft, accepted)
            # The last tokens of an answer too: drafters that keep it would else keep it without its end.
            if tokens and emission.finish_reason != "error" and request.sampling.speculation and self._max_draft:
                behind = None if hidden is None else hidden[turn.first_row : turn.first_row + len(tokens)]
                self._panel.observe(request.id, tokens, behind)

    def _finish(self, ended: Sequences[Sequence]) -> list[Completion]:
        """What sequences that have ended give; all of them leave, or where one raises none, and the next step tries again."""
        completions = []
        for sequence in ended:
            sampling = sequence.request.sampling
            text = answer_text(self.target.tokenizer, sequence.tokens, sampling.stop, sampling.min_tokens)
            completions.append(sequence.complete(text))
        for sequence in ended:
            self._scheduler.remove(sequence.request.id)
            self._panel.end(sequence.request.id)
        return completions


def _fresh(sequence: Sequence, emission: Emission) -> Fresh:
    start = len(sequence.tokens) - len(emission.tokens)
    return Fresh(sequence.request.id, start, tuple(emission.tokens), tuple(emission.sources))
