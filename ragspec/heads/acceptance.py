"""What a head's drafts would have saved, from recorded answers alone: no engine, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ragspec.heads.batches import Positions
from ragspec.heads.store import read_answers
from ragspec.heads.walk import Walker


@dataclass
class HeadAcceptance:
    """A head on answers that it was not trained on.

    Attributes:
        tested: how often a draft reached each place, [depth].
        accepted: how often the token there was the target's, [depth].
        tokens: emitted behind the first token of each answer, by kind of prompt.
        steps: verify steps that this took with drafts of `depth` tokens, by kind of prompt.
    """

    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def by_place(self) -> list[float]:
        """The probability of acceptance at each place, given that all before stood."""
        return [good / max(1, all_) for good, all_ in zip(self.accepted, self.tested, strict=True)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verify step, bonus token included."""
        return sum(self.tokens.values()) / max(1, sum(self.steps.values()))

    def of_kind(self, kind: str) -> float:
        """Mean acceptance length on one kind of prompt."""
        return self.tokens[kind] / max(1, self.steps[kind])


@torch.inference_mode()
def measure(walker: Walker, files: Iterable[Path], depth: int, batch: int = 2048) -> HeadAcceptance:
    """Walk the answers held back, as the engine would with the head alone and `depth` draft tokens a step."""
    found = HeadAcceptance([0] * depth, [0] * depth)
    for path in files:
        answers = read_answers(path)
        held = walker.positions(answers, held_back=True)
        lengths = torch.zeros(len(answers.tokens), dtype=torch.long)
        for part in held.split(batch):
            with torch.autocast(walker.device.type, torch.bfloat16):
                lengths[part.places] = _accepted_lengths(walker, part, depth, found)
        starts, accepted = answers.starts.tolist(), lengths.tolist()
        for number in answers.held_back.nonzero()[:, 0].tolist():
            start, end, kind = starts[number], starts[number + 1] - 1, answers.kinds[number]
            found.tokens[kind] += end - start
            found.steps[kind] += _steps(accepted[start:end])
    return found


def _steps(accepted: Sequence[int]) -> int:
    """Verify steps of an answer, given how many draft tokens stand behind each of its tokens but the last."""
    place = steps = 0
    while place < len(accepted):
        place += accepted[place] + 1
        steps += 1
    return steps


def _accepted_lengths(walker: Walker, part: Positions, depth: int, found: HeadAcceptance) -> Tensor:
    lengths = torch.zeros(len(part.places), dtype=torch.long)
    for place, at in enumerate(walker.walk(part, depth)):
        found.tested[place] += len(at.rows)
        found.accepted[place] += int(at.accepted.sum())
        lengths[at.rows] += at.accepted
    return lengths
