"""Asking drafters, and surviving them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft, Drafter, Evidence, ExtendingDrafter, FeatureDrafter, Stakes, Standing, Stretch
from ragspec.decoding.request import Request

log = logging.getLogger(__name__)


#: Sources that a draft token may name; the target's own tokens are never drafted.
_PROPOSERS = frozenset(Source) - {Source.TARGET}


class DraftingPanel:
    """The engine's drafters: each is asked for the requests that it is told of, and the likeliest of a request's
    drafts is taken elsewhere.

    Args:
        drafters: of drafts that promise the same, the earlier one's is taken, and a costly drafter's last.
        vocabulary: draft tokens must be below it.
    """

    def __init__(self, drafters: Sequence[Drafter], vocabulary: int) -> None:
        self._drafters = tuple(drafters)
        self._vocabulary = vocabulary
        #: Per request, the drafters that have not failed it.
        self._trusted: dict[str, list[Drafter]] = {}
        self.failures = 0
        self.wants_hidden = any(getattr(drafter, "wants_hidden", False) for drafter in drafters)
        #: Those that read features and keep slots of their own, and the layers that they ask for together.
        self.readers = feature_readers(drafters)
        self.features = tuple(sorted({layer for reader in self.readers for layer in reader.features}))
        self._cheap = tuple(drafter for drafter in drafters if not getattr(drafter, "costly", False))
        self._costly = tuple(drafter for drafter in drafters if drafter not in self._cheap)
        self._extending = tuple(cast("ExtendingDrafter", one) for one in self._cheap if hasattr(one, "extend"))

    def begin(self, request: Request) -> None:
        """Introduce a request to every drafter."""
        self._trusted[request.id] = list(self._drafters)
        self._tell(request.id, "begin", lambda drafter: drafter.begin(request))

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Tell every drafter what was emitted."""
        self._tell(request_id, "observe", lambda drafter: drafter.observe(request_id, tokens, hidden))

    def locate(self, standings: Mapping[str, Standing]) -> None:
        """Tell those who read features where the sequences of the step to come stand."""
        for reader in self.readers:
            self._tell_reader(reader, standings, "locate", lambda: reader.locate(standings))  # noqa: B023 - called at once

    def follow(self, stretches: Sequence[Stretch], features: Tensor, rows: Sequence[int]) -> None:
        """Hand what a step computed to those who read features.

        Args:
            stretches: in the order of the rows.
            features: inputs of the layers of `DraftingPanel.features`, of all tokens of the step, [n, layers, hidden].
            rows: the stretches' tokens among them.
        """
        requests = [stretch.request_id for stretch in stretches]
        for reader in self.readers:

            def call(reader: FeatureDrafter = reader) -> None:
                own = [self.features.index(layer) for layer in reader.features]
                reader.follow(stretches, features[rows][:, own])

            self._tell_reader(reader, requests, "follow", call)

    def end(self, request_id: str) -> None:
        """Let every drafter forget a request that it was told of, those that failed it too."""
        if self._trusted.pop(request_id, None) is None:
            return
        for drafter in self._drafters:
            try:
                drafter.end(request_id)
            except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                self._note(drafter, request_id, "end", error)

    @property
    def has_costly(self) -> bool:
        """Whether there are drafters whose time counts."""
        return bool(self._costly)

    def propose(self, limits: Mapping[str, int]) -> dict[str, list[Draft]]:
        """The usable drafts for each request that gets any, of the drafters that cost next to nothing."""
        return self._ask(self._cheap, limits)

    def propose_costly(self, limits: Mapping[str, int], stakes: Stakes) -> dict[str, list[Draft]]:
        """Those of the others."""
        return self._ask(self._costly, limits, stakes)

    def extended(self, request_id: str, draft: Draft, limit: int) -> Draft:
        """A draft, and behind it what the first drafter that can would copy there, up to `limit` tokens together."""
        room = limit - len(draft.tokens)
        if room <= 0 or not draft.evidence:
            return draft
        for drafter in [able for able in self._extending if able in self._trusted.get(request_id, ())]:
            try:
                behind = self._checked(drafter.extend(request_id, draft.tokens, room), room)
                if behind.evidence:
                    return draft.followed_by(behind)
            except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                self._distrust(drafter, request_id, "extend", error)
        return draft

    def _ask(self, drafters: Sequence[Drafter], limits: Mapping[str, int], *stakes: Stakes) -> dict[str, list[Draft]]:
        drafts: dict[str, list[Draft]] = {}
        for drafter in drafters:
            asked = {
                request_id: limit
                for request_id, limit in limits.items()
                if limit > 0 and drafter in self._trusted.get(request_id, ())
            }
            if not asked:
                continue
            try:
                answered = [(i, d) for i, d in drafter.propose(asked, *stakes).items() if i in asked]
            except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                for request_id in asked:
                    self._distrust(drafter, request_id, "propose", error)
                continue
            for request_id, draft in answered:
                try:
                    checked = self._checked(draft, asked[request_id])
                    if checked.tokens:
                        drafts.setdefault(request_id, []).append(checked)
                except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                    self._distrust(drafter, request_id, "propose", error)
        return drafts

    def _checked(self, draft: Draft, limit: int) -> Draft:
        draft = draft.cut(limit)
        if not draft.tokens:
            return draft
        if len(draft.tokens) != len(draft.sources) or not _PROPOSERS.issuperset(draft.sources):
            msg = f"{len(draft.tokens)} draft tokens with sources {draft.sources!r}"
            raise ValueError(msg)
        if draft.evidence and not (
            len(draft.evidence) == len(draft.tokens) and {Evidence}.issuperset(map(type, draft.evidence))
        ):
            msg = f"{len(draft.tokens)} draft tokens with evidence {draft.evidence!r}"
            raise ValueError(msg)
        numbers = {int}.issuperset(map(type, draft.tokens))
        if not (numbers and min(draft.tokens) >= 0 and max(draft.tokens) < self._vocabulary):
            msg = f"draft tokens {draft.tokens!r} are not in the vocabulary of {self._vocabulary}"
            raise ValueError(msg)
        return draft

    def _tell(self, request_id: str, verb: str, call: Callable[[Drafter], Any]) -> None:
        for drafter in list(self._trusted.get(request_id, ())):
            try:
                call(drafter)
            except Exception as error:  # noqa: BLE001 - a drafter can only cost time
                self._distrust(drafter, request_id, verb, error)

    def _tell_reader(self, reader: Drafter, request_ids: Iterable[str], verb: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a drafter can only cost time
            for request_id in request_ids:
                if reader in self._trusted.get(request_id, ()):
                    self._distrust(reader, request_id, verb, error)

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


def feature_readers(drafters: Iterable[Drafter]) -> tuple[FeatureDrafter, ...]:
    """Those that read features and keep slots of their own."""
    return tuple(cast("FeatureDrafter", drafter) for drafter in drafters if getattr(drafter, "features", ()))
