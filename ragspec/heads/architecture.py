"""What all head architectures share, and which there are."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.errors import InputError
from ragspec.heads.shape import HeadShape


class Head(nn.Module, ABC):
    """A network that walks ahead of the target, one token a step.

    Args:
        shape: its numbers.
    """

    #: How checkpoints and settings call it.
    architecture: str

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def longest_draft(self) -> int:
        """Tokens in a row that it makes sense to ask it for."""
        return self.shape.depth

    @property
    def parameter_count(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())


class StateHead(Head):
    """A head whose state is all that it remembers of a sequence.

    The state begins as the target's final hidden state, [..., hidden], and `advance` takes it over one more token.
    `features` of a state times the target's own output rows are the logits of the next token, so such a head has no output
    matrix of its own: the target's is frozen, and large.
    """

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


_ARCHITECTURES: dict[str, type[Head]] = {}


def register(head: type[Head]) -> type[Head]:
    """Make an architecture known by its name."""
    _ARCHITECTURES[head.architecture] = head
    return head


def make_head(architecture: str, shape: HeadShape) -> Head:
    """A head with fresh weights.

    Raises:
        InputError: no such architecture.
        ValueError: the shape lacks what the architecture needs.
    """
    known = architectures()
    if architecture not in known:
        msg = f"There is no head architecture {architecture!r}."
        raise InputError(msg, f"Choose one of {', '.join(known)}.", code="unknown_architecture")
    return _ARCHITECTURES[architecture](shape)


def architectures() -> list[str]:
    """The names."""
    from ragspec.heads import attention, mlp, recurrent  # noqa: F401 - they register themselves

    return sorted(_ARCHITECTURES)
