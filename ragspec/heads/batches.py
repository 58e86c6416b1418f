"""From recorded answers to training batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ragspec.heads.store import Answers, read_answers


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Places in a file's answers from which a head is to draft.

    Attributes:
        answers: the file.
        places: indices of tokens, [n]; the draft begins behind each.
        ahead: how many tokens of the answer follow, at least 1, [n].
    """

    answers: Answers
    places: Tensor
    ahead: Tensor

    def shuffled(self, generator: torch.Generator) -> Positions:
        """The same in a random order."""
        order = torch.randperm(len(self.places), generator=generator)
        return Positions(self.answers, self.places[order], self.ahead[order])

    def split(self, size: int) -> Iterator[Positions]:
        """Batches of `size`, the last perhaps smaller."""
        for start in range(0, len(self.places), size):
            yield Positions(self.answers, self.places[start : start + size], self.ahead[start : start + size])


class WholeAnswers(Positions):
    """The same, where the places of an answer stay together and in order: a head that attends takes in its text once."""

    __slots__ = ()

    def shuffled(self, generator: torch.Generator) -> WholeAnswers:
        """The answers in a random order."""
        runs = self._runs()
        drawn = torch.randperm(len(runs), generator=generator).tolist()
        order = torch.cat([torch.zeros(0, dtype=torch.long), *(runs[i] for i in drawn)])
        return WholeAnswers(self.answers, self.places[order], self.ahead[order])

    def split(self, size: int) -> Iterator[WholeAnswers]:
        """Batches of as many answers as it takes to `size` places, the last perhaps smaller."""
        batch: list[Tensor] = []
        runs = self._runs()
        for number, run in enumerate(runs, 1):
            batch.append(run)
            if sum(map(len, batch)) >= size or number == len(runs):
                order = torch.cat(batch)
                yield WholeAnswers(self.answers, self.places[order], self.ahead[order])
                batch = []

    def each(self) -> list[tuple[int, Tensor]]:
        """The number of each answer, and the rows of its places in order."""
        runs = self._runs()
        firsts = torch.stack([self.places[run[0]] for run in runs]) if runs else self.places
        numbers = torch.searchsorted(self.answers.starts, firsts, right=True) - 1
        return list(zip(numbers.tolist(), runs, strict=True))

    def _runs(self) -> list[Tensor]:
        # The last token of an answer is no place, so the next answer's first is never the one behind.
        if not len(self.places):
            return []
        breaks = (self.places.diff() != 1).nonzero()[:, 0] + 1
        return list(torch.arange(len(self.places)).tensor_split(breaks))


def positions(answers: Answers, *, held_back: bool) -> Positions:
    """Every place that a draft can begin behind, in the answers to train on or in those held back."""
    starts = answers.starts.tolist()
    places, ahead = [], []
    for (start, end), held in zip(pairwise(starts), answers.held_back.tolist(), strict=True):
        if held == held_back and end - start > 1:
            places.append(torch.arange(start, end - 1))
            ahead.append(end - 1 - places[-1])
    empty = torch.zeros(0, dtype=torch.long)
    return Positions(answers, torch.cat([empty, *places]), torch.cat([empty, *ahead]))


def draft_vocabulary(files: Sequence[Path], size: int, vocabulary: int) -> tuple[int, ...]:
    """The tokens that the target writes most often; where it wrote fewer than `size`, the lowest ids, which a byte-pair
    tokenizer learnt first, fill up.
    """
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for path in files:
        tokens = read_answers(path).tokens.long()
        counts += torch.bincount(tokens, minlength=vocabulary)
    order = (-counts).argsort(stable=True)[: min(size, vocabulary)]
    return tuple(sorted(order.tolist()))
