"""The answers of running jobs, for drafts to copy from. Answers of one job never feed another's drafts."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragspec.decoding.matching import MatchIndex

#: Tokens of answers kept for a group: 500 answers of 64 tokens, in 13 MB of Python objects (tracemalloc).
GROUP_TOKENS = 32_768
#: Groups kept after their last request has ended: between two requests of a job there may be none for a moment.
IDLE_GROUPS = 4
#: Stands before every answer, so that no match runs over from one answer into the next, and so that how answers begin
#: is found.
ANSWER_START = -1


@dataclass(slots=True)
class _Group:
    """The answers of one group, one behind the other.

    Attributes:
        index: their tokens.
        starts: place of each answer's `ANSWER_START`, rising.
        used: of each, whether a draft was copied from it since it was (last) added.
        requests: running requests of the group.
    """

    index: MatchIndex = field(default_factory=MatchIndex)
    starts: list[int] = field(default_factory=list)
    used: list[bool] = field(default_factory=list)
    requests: int = 0

    def add(self, answer: Sequence[int]) -> None:
        self.starts.append(self.index.end)
        self.used.append(False)
        self.index.extend(answer)


class JobAnswers:
    """Answers by group, in bounded memory.

    Of a group's answers those least recently used go first, by the second-chance rule: the oldest is dropped, unless
    a draft was copied from it since it was added; then it is added anew instead. So nothing need be moved when an
    answer is used.

    Args:
        group_tokens: kept for a group at most, but for its newest answer, which is always kept.
        idle_groups: kept without running requests at most; the longest idle go first.
    """

    def __init__(self, group_tokens: int = GROUP_TOKENS, idle_groups: int = IDLE_GROUPS) -> None:
        self._group_tokens = group_tokens
        self._idle_groups = idle_groups
        self._groups: dict[str, _Group] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    def join(self, name: str) -> None:
        """A request of the group begins."""
        self._groups.setdefault(name, _Group()).requests += 1
        self._idle.pop(name, None)

    def leave(self, name: str) -> None:
        """A request of the group has ended."""
        group = self._groups[name]
        group.requests -= 1
        if group.requests == 0:
            self._idle[name] = None
            if len(self._idle) > self._idle_groups:
                longest_idle, _ = self._idle.popitem(last=False)
                del self._groups[longest_idle]

    def index(self, name: str) -> MatchIndex:
        """The text of the group's answers, each behind an `ANSWER_START`."""
        return self._groups[name].index

    def add(self, name: str, answer: Sequence[int]) -> None:
        """Add an answer, `ANSWER_START` first."""
        group = self._groups[name]
        group.add(answer)
        spared = False
        while len(group.index) > self._group_tokens and len(group.starts) > 1:
            start, used = group.starts.pop(0), group.used.pop(0)
            end = group.starts[0]
            if used and not spared:  # one a call: adding an answer takes time in that answer, not in the group
                group.add(group.index.read(start, end - start))
                spared = True
            group.index.forget(end)

    def use(self, name: str, place: int) -> None:
        """A draft is copied from the answer at `place`."""
        group = self._groups[name]
        group.used[bisect_right(group.starts, place) - 1] = True
