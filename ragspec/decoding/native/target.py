"""The common decoder shape as target, in 8 bits on CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragspec.decoding.attention import Segment
from ragspec.decoding.native.build import load_kernels
from ragspec.decoding.native.cache import PackedCache, round_up
from ragspec.decoding.native.decoder import Decoder, misfit
from ragspec.decoding.target import StepOutput
from ragspec.decoding.transformers_target import context_window, end_tokens, warn_of_processors

log = logging.getLogger(__name__)

#: Largest mean divergence, KL in nats, between the 8-bit model and the one it was made from, over the positions of the check.
#: The default model's is 0.003 to 0.03; a wrong mask, position or scale gives 0.5 and more.
CHECK_TOLERANCE = 0.15
#: Tokens of the check: more than two blocks of keys.
CHECKED_TOKENS = 160
#: Angles are tabled for so many positions at most.
_MOST_POSITIONS = 131072


class MisfitError(Exception):
    """The kernels cannot stand in for a model; the message says why."""


@dataclass(frozen=True, eq=False)
class NativeTarget:
    """A decoder whose step is one call of the kernels.

    Its logits for a token depend on that token's own sequence and on nothing else, bit for bit: integer sums have no order,
    and whatever is not an integer is computed row by row in an order that is fixed. So its answers do not change with the
    batch, the width of drafts, the chunks of a prompt or what was cached.

    Attributes:
        decoder: the packed weights.
        tokenizer: its tokenizer, with the chat template.
        identity: `name@fingerprint+int8`, recorded with every answer.
        eos_ids: tokens that end an answer.
        context_window: most tokens of prompt and answer that its positions allow.
    """

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    identity: str
    eos_ids: frozenset[int]
    context_window: int

    @property
    def precision(self) -> str:
        """What it computes in, as RAGSPEC_PRECISION names it."""
        return "int8"

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return torch.device("cpu")

    @property
    def vocabulary(self) -> int:
        """Rows of the output matrix; a draft token must be below."""
        return self.decoder.vocabulary

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return self.decoder.hidden

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.decoder.layers

    def embedding_rows(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings, in bfloat16; see `Target.embedding_rows`."""
        rows: Tensor = self.decoder.embedding[list(tokens)]
        return rows

    def output_rows(self, tokens: Sequence[int]) -> Tensor:
        """Rows of the output matrix as the kernels have it, in float32; see `Target.output_rows`."""
        return self.decoder.output.dequantized(tokens)

    def slot_bytes(self, capacity: int) -> int:
        """Memory of one cache slot of `capacity` tokens."""
        return round_up(capacity) * self.decoder.token_bytes

    def context_read(self, reached: int) -> int:
        """Places of a slot that a decode step reads; see `Target.context_read`."""
        return reached

    def make_cache(self, slots: int, capacity: int) -> PackedCache:
        """A cache that `forward` can use; see `Target.make_cache`."""
        return self.decoder.make_cache(slots, capacity)

    def forward(
        self,
        cache: PackedCache,
        segments: Sequence[Segment],
        tokens: list[int],
        rows: list[int],
        *,
        hidden: bool = False,
        features: Sequence[int] = (),
    ) -> StepOutput:
        """One forward pass over a packed step; see `Target.forward`."""
        out = self.decoder.forward(cache, segments, tokens, rows, features)
        return out if hidden else replace(out, hidden=None)


def make_native_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, identity: str, kernels: Path
) -> NativeTarget:
    """Quantise a model that is in memory on the CPU, and check that it still says much the same.

    Args:
        model: left as it is.
        tokenizer: its tokenizer.
        identity: what the answers will name.
        kernels: folder for the compiled kernels.

    Raises:
        BuildError: the kernels cannot be compiled here.
        MisfitError: they do not compute this model's step, or 8 bits do not carry it.
    """
    model.train(mode=False)
    if reason := misfit(model):
        raise MisfitError(reason)
    window = context_window(model)
    decoder = Decoder(load_kernels(kernels), model, min(window, _MOST_POSITIONS))
    target = NativeTarget(decoder, tokenizer, identity, end_tokens(model, tokenizer), min(window, _MOST_POSITIONS))
    warn_of_processors(model)
    _check(target, model)
    return target


@torch.inference_mode()
def _check(target: NativeTarget, model: PreTrainedModel) -> None:
    """Compare with the model itself over several blocks of keys, in chunks and a step that cross their borders."""
    length = min(CHECKED_TOKENS, target.context_window)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocabulary, (length,), generator=generator).tolist()
    cache = target.make_cache(2, length)
    ours = []
    for start, end in pairwise((0, length // 3, length - 6, length)):
        segment = Segment(1, start, end - start)
        ours.append(target.forward(cache, [segment], tokens[start:end], list(range(end - start))).logits)
    theirs = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    expected = theirs.float().log_softmax(-1)
    divergence = (expected.exp() * (expected - torch.cat(ours).log_softmax(-1))).sum(-1)
    mean = float(divergence.mean())
    log.info("int8 checked", extra={"action": "check_int8", "divergence_nats": mean})
    if not mean <= CHECK_TOLERANCE:
        msg = f"in 8 bits its distributions diverge by {mean:.3g} nats on average"
        raise MisfitError(msg)
