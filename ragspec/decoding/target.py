"""The target: the decoder whose output counts, as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ragspec.decoding.attention import Segment


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a forward pass gives for the wanted rows.

    Attributes:
        logits: [r, vocabulary].
        choices: the token of each row's highest logit, [r].
        normalizers: log of the sum of each row's exponentials, [r]: a token's log-probability is its logit less this.
        hidden: final hidden states, [r, hidden], where they were asked for.
        features: hidden states between layers of every token of the step, [n, layers asked for, hidden], where they were.
    """

    logits: Tensor
    choices: Tensor
    normalizers: Tensor
    hidden: Tensor | None = None
    features: Tensor | None = None

    def logprobs(self, places: Sequence[tuple[int, int]]) -> list[float]:
        """Log-probabilities under the target's unmodified softmax.

        Args:
            places: row and token of each.
        """
        if not places:
            return []
        if self.logits.device.type == "cpu" and self.logits.dtype is torch.float32:
            # Number by number: there are a few dozen, and a torch operator takes longer to start than these to read.
            logits, normalizers = self.logits.numpy(), self.normalizers.numpy()
            return [(logits[row, token] - normalizers[row]).item() for row, token in places]
        rows, tokens = torch.tensor(places, device=self.logits.device).T
        found: list[float] = (self.logits[rows, tokens].float() - self.normalizers[rows]).tolist()
        return found


class Cache(Protocol):
    """Keys and values of many sequences, one slot each; how long a slot is, its owner knows."""

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Give `destination` the first `length` tokens that `source` holds."""
        ...

    def clear(self, slot: int) -> None:
        """Wipe a slot whose numbers went wrong."""
        ...


class SlotKeeper(Protocol):
    """Whoever keeps something for every token of a slot: the target, and drafters that attend."""

    def slot_bytes(self, capacity: int) -> int:
        """Memory of one slot of `capacity` tokens."""
        ...

    def make_cache(self, slots: int, capacity: int) -> Cache:
        """A cache, its memory reserved.

        Raises:
            RuntimeError: the memory does not suffice, in the allocator's words.
        """
        ...


class Target(Protocol):
    """A decoder that runs packed, ragged steps over a cache of its own making.

    `TransformersTarget` runs any causal language model on any device; `NativeTarget` runs the common shape in 8 bits on CPU.
    """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, with the chat template."""
        ...

    @property
    def identity(self) -> str:
        """`name@fingerprint+precision`, recorded with every answer."""
        ...

    @property
    def precision(self) -> str:
        """float32, bfloat16, float16 or int8."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def context_window(self) -> int:
        """Most tokens of prompt and answer that its positions allow."""
        ...

    @property
    def vocabulary(self) -> int:
        """Rows of the output matrix; a draft token must be below."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        ...

    @property
    def layers(self) -> int:
        """Decoder layers between which its hidden states can be had; 0 where they cannot."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        ...

    def embedding_rows(self, tokens: Sequence[int]) -> Tensor:
        """The embeddings of tokens, [n, hidden], on the target's device; a copy."""
        ...

    def output_rows(self, tokens: Sequence[int]) -> Tensor:
        """The rows of the output matrix that give the logits of tokens, [n, hidden], on the target's device; a copy.

        An output bias or a soft cap on the logits is not in them: what is drafted by them is a little worse for it.
        """
        ...

    def slot_bytes(self, capacity: int) -> int:
        """Memory of one cache slot of `capacity` tokens."""
        ...

    def context_read(self, reached: int) -> int:
        """Places of each slot that a decode step reads whose longest text then has `reached` tokens: more where it is padded.

        A slot of less capacity is read no further than that.
        """
        ...

    def make_cache(self, slots: int, capacity: int) -> Any:
        """A cache that `forward` can use, its memory reserved.

        Args:
            slots: sequences held at once.
            capacity: tokens a slot holds.

        Raises:
            RuntimeError: the memory does not suffice, in the allocator's words.
        """
        ...

    def forward(
        self,
        cache: Any,
        segments: Sequence[Segment],
        tokens: list[int],
        rows: list[int],
        *,
        hidden: bool = False,
        features: Sequence[int] = (),
    ) -> StepOutput:
        """One forward pass over a packed step.

        Args:
            cache: where the sequences live; the new tokens' keys and values are written into it.
            segments: whose the tokens are and where they continue, in packed order.
            tokens: the segments' new tokens, [n].
            rows: packed places whose next-token logits are wanted, [r].
            hidden: whether the final hidden states behind the logits are wanted too.
            features: layers whose input is wanted of every token, in [0, layers]; the last is what leaves the last layer,
                before the final norm.

        Call it inside `torch.inference_mode()`.
        """
        ...
