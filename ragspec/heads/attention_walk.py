"""An attention head beside what the target wrote: the features of whole texts, and drafts along their answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from ragspec.decoding.attention import Segment
from ragspec.decoding.target import Target
from ragspec.errors import InputError
from ragspec.heads.attention import AttentionHead
from ragspec.heads.batches import Positions, WholeAnswers, positions
from ragspec.heads.replay import CHUNK
from ragspec.heads.shape import feature_layers
from ragspec.heads.store import Answers
from ragspec.heads.walk import Place, frozen_rows, judged


@dataclass
class _Text:
    """A prompt and its answer, and how far the drafts along it have come.

    Attributes:
        rows: the batch's positions whose drafts still stand, [m].
        origins: the place in the text from which each of them began, [m].
        keys: of the whole text, [key_heads, n, head_dim].
        values: the same.
        state: behind each draft, [m, width].
        own: keys and values that the drafts have left behind so far, of each place [key_heads, m, head_dim] twice.
    """

    rows: Tensor
    origins: Tensor
    keys: Tensor
    values: Tensor
    state: Tensor
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def keep(self, alive: Tensor) -> None:
        """Go on with these drafts alone, [m]."""
        there = alive.to(self.state.device)
        self.rows, self.origins, self.state = self.rows[alive], self.origins[there], self.state[there]
        self.own = [(keys[:, there], values[:, there]) for keys, values in self.own]


class AttentionWalker:
    """Of a head that attends; see `ragspec.heads.walk.Walker`.

    Features are not recorded, they are many times what text and final states are: the target reads each text again.

    Args:
        head: drafts.
        target: reads the texts; its rows serve as in `FrozenRows`.
    """

    def __init__(self, head: AttentionHead, target: Target) -> None:
        self.head = head
        self.device = target.device
        self._target = target
        own = head.embedding
        self._frozen = frozen_rows(target, head, embedding=None if own is None else own.weight.detach())
        self._layers = feature_layers(head.layer, target.layers)
        self._cache: Any = None
        self._capacity = 0

    def positions(self, answers: Answers, *, held_back: bool) -> WholeAnswers:
        """See `Walker`."""
        if not bool((answers.prompt_starts.diff() > 0).all()):
            msg = "The answers were recorded without their prompts, which a head that attends reads too."
            raise InputError(msg, "Record answers with `ragspec head data` into a new folder.", code="no_head_data")
        found = positions(answers, held_back=held_back)
        return WholeAnswers(answers, found.places, found.ahead)

    def walk(self, batch: Positions, depth: int) -> Iterator[Place]:
        """See `Walker`."""
        whole = cast("WholeAnswers", batch)
        texts = [self._read(whole, number, rows) for number, rows in whole.each()]
        for place in range(depth):
            for text in texts:
                if place:
                    self._advance(text, batch, place)
            rows = torch.cat([text.rows for text in texts])
            normed = self.head.output_norm(torch.cat([text.state for text in texts]))
            output = self._frozen.output if self.head.output is None else self.head.output.weight
            at = judged(self._frozen, batch, rows, place, normed @ output.to(normed.dtype).T)
            yield at
            kept = torch.split(at.alive(batch, place), [len(text.rows) for text in texts])
            for text, alive in zip(texts, kept, strict=True):
                text.keep(alive)
            texts = [text for text in texts if len(text.rows)]
            if not texts:
                return

    def _read(self, batch: WholeAnswers, number: int, rows: Tensor) -> _Text:
        """Take a text in, and draft the first token behind each place of its answer."""
        answers = batch.answers
        start, end = answers.starts[number : number + 2].tolist()
        prompt = answers.prompt(number)
        tokens = torch.cat([prompt, answers.tokens[start:end]]).long()
        # A draft behind the answer's first token begins at the prompt's last: its features, and that token behind it.
        origins = (batch.places[rows] - start + len(prompt) - 1).to(self.device)
        states = self.head.fuse(self._features(tokens[:-1].tolist()).flatten(1))
        embedded = self._embedded(tokens[1:])
        queries, keys, values = self.head.project(states, embedded, torch.arange(len(states), device=self.device))
        text = _Text(rows, origins, keys[0], values[0], states[origins])
        text.state = self.head.settle(text.state, _attend(text, queries[0][:, origins]))
        return text

    def _advance(self, text: _Text, batch: Positions, place: int) -> None:
        """Go over one more token of each draft."""
        embedded = self._embedded(batch.answers.tokens[batch.places[text.rows] + place])
        queries, keys, values = self.head.project(text.state, embedded, text.origins + place)
        text.own.append((keys[0], values[0]))
        text.state = self.head.settle(text.state, _attend(text, queries[0]))

    def _features(self, tokens: list[int]) -> Tensor:
        if len(tokens) > self._capacity:
            self._capacity = len(tokens)
            self._cache = self._target.make_cache(1, self._capacity)
        parts = []
        with torch.autocast(self.device.type, enabled=False), torch.inference_mode():
            for start in range(0, len(tokens), CHUNK):
                fed = tokens[start : start + CHUNK]
                out = self._target.forward(self._cache, [Segment(0, start, len(fed))], fed, [], features=self._layers)
                parts.append(cast("Tensor", out.features))
        # A copy: what inference mode gave, no gradient may be taken through.
        return torch.cat(parts).to(self._frozen.output.dtype, copy=True)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._frozen.embedding[tokens.to(self.device, torch.long)]


def _attend(text: _Text, queries: Tensor) -> Tensor:
    """Attention of each draft to the text up to its origin and to what it left behind itself.

    Args:
        text: the drafts.
        queries: [heads, m, head_dim].

    Returns:
        [m, heads * head_dim].
    """
    kv_heads, length, dim = text.keys.shape
    folded = queries.unflatten(0, (kv_heads, -1)) * dim**-0.5  # type: ignore[no-untyped-call]
    scores = torch.einsum("kgmd,knd->kgmn", folded, text.keys)
    behind = torch.arange(length, device=queries.device) > text.origins[:, None]
    own = [torch.einsum("kgmd,kmd->kgm", folded, keys)[..., None] for keys, _ in text.own]
    weights = torch.cat([scores.masked_fill(behind, float("-inf")), *own], -1).float().softmax(-1).to(text.values.dtype)
    mixed = torch.einsum("kgmn,knd->kgmd", weights[..., :length], text.values)
    for number, (_, values) in enumerate(text.own):
        mixed = mixed + weights[..., length + number, None] * values[:, None]
    return mixed.permute(2, 0, 1, 3).flatten(1)
