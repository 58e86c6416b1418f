"""Letting the engine write text, and keeping the hidden states behind every token as it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragspec.decoding.draft import Draft
from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Request
from ragspec.decoding.target import Target


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """An answer and the states that it came from.

    Attributes:
        request_id: whose.
        prompt: what was answered.
        text: the answer.
        tokens: [n].
        hidden: the target's final hidden states, [n, hidden]: row i gave `tokens[i]`.
    """

    request_id: str
    prompt: tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    hidden: Tensor


class HiddenRecorder:
    """A drafter that proposes nothing and keeps the hidden states behind what is emitted."""

    name = "recorder"
    wants_hidden = True

    def __init__(self) -> None:
        self._states: dict[str, list[Tensor]] = {}
        self._finished: dict[str, Tensor] = {}

    def begin(self, request: Request) -> None:
        """A request enters."""
        self._states[request.id] = []

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Keep the states, halved in width: they are trained on in bfloat16."""
        del tokens
        if hidden is None:
            msg = "the target gave no hidden states"
            raise ValueError(msg)
        self._states[request_id].append(hidden.to(torch.bfloat16, copy=True).cpu())

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        """Nothing."""
        del limits
        return {}

    def end(self, request_id: str) -> None:
        """A request left; what it gave waits to be fetched."""
        states = self._states.pop(request_id, None)
        if states:
            self._finished[request_id] = torch.cat(states)

    def fetch(self, request_id: str) -> Tensor | None:
        """The states of a finished request, [n, hidden], once."""
        return self._finished.pop(request_id, None)


def record(target: Target, requests: Iterable[Request], *, batch: int, window: int) -> Iterator[Recording]:
    """Answer requests, as they come, and yield each with its states, as they finish.

    Args:
        target: who answers; no drafts, since the batch is wide.
        requests: taken as the batch has room.
        batch: sequences decoded together.
        window: tokens of prompt and answer; a prompt that does not fit is left out.
    """
    recorder = HiddenRecorder()
    engine = Engine(target, max_batch=batch, context_window=window, max_draft=1, drafters=[recorder])
    waiting = iter(requests)
    prompts: dict[str, tuple[int, ...]] = {}
    exhausted = False
    while True:
        while not exhausted and engine.running + engine.waiting < batch + batch // 4:
            request = next(waiting, None)
            if request is None:
                exhausted = True
            elif len(request.prompt) < engine.window:
                engine.add(request)
                prompts[request.id] = tuple(request.prompt)
        if exhausted and not engine.has_work:
            return
        for done in engine.step():
            hidden, prompt = recorder.fetch(done.request_id), prompts.pop(done.request_id)
            # Fewer states than tokens: the recorder failed on the way, and the panel took it out.
            if hidden is not None and len(hidden) == done.completion_tokens and done.finish_reason != "error":
                yield Recording(done.request_id, prompt, done.text, done.acceptance.token_ids, hidden)
