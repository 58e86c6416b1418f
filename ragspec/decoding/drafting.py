"""Asking drafters, and surviving them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ragspec.decoding.draft import Draft, Drafter
from ragspec.decoding.request import Request

log = logging.getLogger(__name__)


class DraftingPanel:
    """The engine's drafters in order of preference: a request takes its draft from the first that has one.

    Args:
        drafters: asked in this order.
        vocabulary: draft tokens must be below it.
    """

    def __init__(self, drafters: Sequence[Drafter], vocabulary: int) -> None:
        self._drafters = tuple(drafters)
        self._vocabulary = vocabulary
        #: Per request, the drafters that have not failed it.
        self._trusted: dict[str, list[Drafter]] = {}
        self.failures = 0
        self.wants_hidden = any(getattr(drafter, "wants_hidden", False) for drafter in drafters)

    def begin(self, request: Request) -> None:
        """Introduce a request to every drafter."""
        self._trusted[request.id] = list(self._drafters)
        self._tell(request.id, "begin", lambda drafter: drafter.begin(request))

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Tell every drafter what was emitted."""
        self._tell(request_id, "observe", lambda drafter: drafter.observe(request_id, tokens, hidden))

    def end(self, request_id: str) -> None:
        """Let every drafter forget a request, those that failed it too."""
        self._trusted.pop(request_id, None)
        for drafter in self._drafters:
            try:
                drafter.end(request_id)
            except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                self._note(drafter, request_id, "end", error)

    def propose(self, limits: dict[str, int]) -> dict[str, Draft]:
        """A usable draft for each request that gets one."""
        drafts: dict[str, Draft] = {}
        for drafter in self._drafters:
            asked = {
                request_id: limit
                for request_id, limit in limits.items()
                if limit > 0 and request_id not in drafts and drafter in self._trusted.get(request_id, ())
            }
            if not asked:
                continue
            try:
                answered = dict(drafter.propose(asked))
            except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                for request_id in asked:
                    self._distrust(drafter, request_id, "propose", error)
                continue
            for request_id, draft in answered.items():
                if request_id not in asked or not draft.tokens:
                    continue
                try:
                    drafts[request_id] = self._checked(draft, asked[request_id])
                except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                    self._distrust(drafter, request_id, "propose", error)
        return drafts

    def _checked(self, draft: Draft, limit: int) -> Draft:
        draft = draft.cut(limit)
        if len(draft.tokens) != len(draft.sources):
            msg = f"{len(draft.tokens)} draft tokens with {len(draft.sources)} sources"
            raise ValueError(msg)
        for token in draft.tokens:
            if not isinstance(token, int) or not 0 <= token < self._vocabulary:
                msg = f"draft token {token!r} is not in the vocabulary of {self._vocabulary}"
                raise ValueError(msg)
        shape = None if draft.probabilities is None else tuple(draft.probabilities.shape)
        if shape is not None and shape != (len(draft.tokens), self._vocabulary):
            msg = f"draft probabilities have shape {shape}"
            raise ValueError(msg)
        return draft

    def _tell(self, request_id: str, verb: str, call: Callable[[Drafter], Any]) -> None:
        for drafter in list(self._trusted.get(request_id, ())):
            try:
                call(drafter)
            except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                self._distrust(drafter, request_id, verb, error)

    def _distrust(self, drafter: Drafter, request_id: str, verb: str, error: Exception) -> None:
        self._trusted[request_id].remove(drafter)
        self._note(drafter, request_id, verb, error)

    def _note(self, drafter: Drafter, request_id: str, verb: str, error: Exception) -> None:
        self.failures += 1
        log.warning(
            "drafter %s failed in %s and is out for request %s: %s",
            drafter.name,
            verb,
            request_id,
            error,
            extra={"action": "drafter_failed", "drafter": drafter.name},
        )
