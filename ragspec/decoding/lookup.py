"""Drafting by lookup: what followed earlier occurrences of the present ending.

Prompt lookup (Saxena 2023; n-gram speculation in vLLM) in three texts: the retrieved passages and the rest of the
prompt, the answer so far, and the earlier answers of the same job. This is where retrieval and speculation meet. The
longest match is copied from, as SAM-Decoding (arXiv 2411.10666) found; where it occurs several times the most
frequent continuation, and of equally frequent ones the newest. How long the match is and how many of its occurrences
agree is the draft's evidence: it decides how much of the draft is verified (`ragspec.decoding.width`), so a long
match earns a long copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft
from ragspec.decoding.job_answers import ANSWER_START, JobAnswers
from ragspec.decoding.lookup_evidence import evidence
from ragspec.decoding.matching import LONGEST_MATCH, MatchIndex
from ragspec.decoding.request import Request


class OwnTextDrafter:
    """Copies from the request's own prompt and answer."""

    name = "lookup"

    def __init__(self) -> None:
        self._texts: dict[str, _OwnText] = {}

    def begin(self, request: Request) -> None:
        """Index the prompt."""
        self._texts[request.id] = _OwnText(request)

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Note what was emitted: it is indexed when a draft is asked for, since drafters rest where drafts do not pay."""
        del hidden
        self._texts[request_id].unread.extend(tokens)

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        """Copy what most often followed the longest match of each text's ending."""
        return {request_id: self._texts[request_id].draft(limit) for request_id, limit in limits.items() if limit > 0}

    def extend(self, request_id: str, tokens: Sequence[int], limit: int) -> Draft:
        """See `ragspec.decoding.draft.ExtendingDrafter`: a head foresees how a sentence begins, and the rest is copied."""
        return self._texts[request_id].draft(limit, tokens)

    def end(self, request_id: str) -> None:
        """Drop the text and its index."""
        self._texts.pop(request_id, None)


class _OwnText:
    """A prompt and its answer so far."""

    def __init__(self, request: Request) -> None:
        self.index = MatchIndex()
        self.index.extend(request.prompt)
        self.unread: list[int] = []
        self._sources = [Source.PROMPT] * len(request.prompt)
        for start, end in request.passage_spans:
            self._sources[start:end] = [Source.PASSAGE] * (end - start)

    def draft(self, limit: int, ahead: Sequence[int] = ()) -> Draft:
        """What follows the text and, behind it, `ahead`."""
        if self.unread:
            self.index.extend(self.unread)
            self.unread.clear()
        text = self.index.tokens
        match = self.index.find([*text[-LONGEST_MATCH:], *ahead] if ahead else text)
        if match is None:
            return Draft()
        place, votes = self.index.elect(match)
        # A copy that reaches the text's end goes on with what it has copied, as in LZ77: a text that repeats itself
        # at a short distance has earned a long draft all the same.
        period = self.index.end + len(ahead) - place
        tokens = [*self.index.read(place, limit), *ahead][:limit]
        sources = self._sources[place : place + limit]
        sources += [Source.ANSWER] * (len(tokens) - len(sources))
        if period < limit:
            tokens, sources = (tokens * (limit // period + 1))[:limit], (sources * (limit // period + 1))[:limit]
        return Draft(tuple(tokens), tuple(sources), evidence("own", match, votes, len(tokens)))


class JobDrafter:
    """Copies from the earlier answers of the request's group; a request without a group gets nothing."""

    name = "job"

    def __init__(self, answers: JobAnswers | None = None) -> None:
        self._answers = JobAnswers() if answers is None else answers
        self._groups: dict[str, str] = {}
        self._written: dict[str, list[int]] = {}

    def begin(self, request: Request) -> None:
        """Note the request's group."""
        if request.group is not None:
            self._groups[request.id] = request.group
            self._written[request.id] = [ANSWER_START]
            self._answers.join(request.group)

    def observe(self, request_id: str, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Note what was emitted."""
        del hidden
        if request_id in self._written:
            self._written[request_id].extend(tokens)

    def propose(self, limits: Mapping[str, int]) -> Mapping[str, Draft]:
        """Copy what most often followed the longest match of each answer's ending in its group's answers."""
        drafts = {}
        for request_id, limit in limits.items():
            group = self._groups.get(request_id)
            if group is not None and limit > 0:
                drafts[request_id] = self._draft(group, self._written[request_id], limit)
        return drafts

    def end(self, request_id: str) -> None:
        """Give the answer, as far as it came, to the group."""
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._answers.add(group, self._written.pop(request_id))
            self._answers.leave(group)

    def _draft(self, group: str, written: list[int], limit: int) -> Draft:
        index = self._answers.index(group)
        match = index.find(written)
        if match is None:
            return Draft()
        place, votes = index.elect(match)
        tokens = index.read(place, limit)
        if ANSWER_START in tokens:
            tokens = tokens[: tokens.index(ANSWER_START)]
        if tokens:
            self._answers.use(group, place)
        return Draft(tuple(tokens), (Source.JOB,) * len(tokens), evidence("job", match, votes, len(tokens)))
