"""What all head architectures share, and which there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.errors import InputError


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The numbers that a head is built by.

    Attributes:
        hidden: width of the target's hidden states.
        inner: width of the head's own layer.
        draft_tokens: the draft vocabulary, rising: the tokens a head can propose without being told (FR-Spec,
            arXiv 2502.14856); a prompt's own tokens come on top.
        depth: how many tokens ahead it was trained for.
        epsilon: of its norms.
    """

    hidden: int
    inner: int
    draft_tokens: tuple[int, ...]
    depth: int = 4
    epsilon: float = 1e-5


class Head(nn.Module, ABC):
    """A network that walks ahead of the target, one token a step.

    A state stands for a sequence; it begins as the target's final hidden state, [..., hidden], and `advance` takes it over one
    more token. `features` of a state times the target's own output rows are the logits of the next token, so a head has no
    output matrix of its own: the target's is frozen, and large.

    Args:
        shape: its numbers.
    """

    #: How checkpoints and settings call it.
    architecture: str

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def advance(self, state: Tensor, embedded: Tensor, place: int) -> Tensor:
        """The state after one more token.

        Args:
            state: [..., hidden].
            embedded: the token's embedding in the target, [..., hidden].
            place: how many tokens were drafted before.

        Returns:
            [..., hidden].
        """

    @abstractmethod
    def features(self, state: Tensor, place: int) -> Tensor:
        """What the target's output rows are multiplied with, [..., hidden], for the token drafted at `place`."""

    @property
    def longest_draft(self) -> int:
        """Tokens in a row that it makes sense to ask it for."""
        return self.shape.depth

    @property
    def parameter_count(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())


class Norm(nn.Module):
    """Root mean square norm with a gain (arXiv 1910.07467), in float32."""

    def __init__(self, width: int, epsilon: float, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), gain))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Of the last dimension."""
        normed = functional.rms_norm(x.float(), (x.shape[-1],), self.gain.float(), self.epsilon)
        return normed.to(x.dtype)


_ARCHITECTURES: dict[str, Callable[[HeadShape], Head]] = {}


def register(head: type[Head]) -> type[Head]:
    """Make an architecture known by its name."""
    _ARCHITECTURES[head.architecture] = head
    return head


def make_head(architecture: str, shape: HeadShape) -> Head:
    """A head with fresh weights.

    Raises:
        InputError: no such architecture.
    """
    known = architectures()
    if architecture not in known:
        msg = f"There is no head architecture {architecture!r}."
        raise InputError(msg, f"Choose one of {', '.join(known)}.", code="unknown_architecture")
    return _ARCHITECTURES[architecture](shape)


def architectures() -> list[str]:
    """The names."""
    from ragspec.heads import mlp, recurrent  # noqa: F401 - they register themselves

    return sorted(_ARCHITECTURES)
