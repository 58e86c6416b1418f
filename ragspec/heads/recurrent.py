"""A recurrent head: each draft token is conditioned on the one before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.heads.architecture import Norm, StateHead, register
from ragspec.heads.shape import HeadShape


@register
class RecurrentHead(StateHead):
    """A gated MLP that takes a state over one token, with a residual, the same weights at every place.

        x = [norm(state), norm(embedding of the token)]
        state' = state + down(silu(gate(x)) * up(x))
        features = norm(state')

    Like Hydra's heads (arXiv 2402.05109) it sees the tokens drafted so far, and like Arctic's speculators it carries a state,
    so it needs no cache of its own and batches trivially. `ragspec_draft` in `decoding/native` computes the same in 8 bits.
    """

    architecture = "recurrent"

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        width, inner = shape.hidden, shape.inner
        self.state_norm = Norm(width, shape.epsilon)
        self.token_norm = Norm(width, shape.epsilon)
        self.output_norm = Norm(width, shape.epsilon)
        self.gate_up = nn.Linear(2 * width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        nn.init.normal_(self.gate_up.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(self.down.weight, std=0.5 * inner**-0.5)

    @property
    def longest_draft(self) -> int:
        """More than it was trained for: every place is like the one before."""
        return 2 * self.shape.depth

    def advance(self, state: Tensor, embedded: Tensor, place: int) -> Tensor:
        """See `StateHead.advance`; the place makes no difference."""
        del place
        seen = torch.cat((self.state_norm(state), self.token_norm(embedded)), -1)
        gate, up = self.gate_up(seen).chunk(2, -1)
        changed: Tensor = state + self.down(functional.silu(gate) * up)
        return changed

    def weights(self) -> dict[str, Tensor]:
        """Its matrices and gains by name, as `ragspec.decoding.native.head` wants them."""
        return {name.rpartition(".")[0]: value.detach() for name, value in self.state_dict().items()}

    def features(self, state: Tensor, place: int) -> Tensor:
        """See `StateHead.features`."""
        del place
        features: Tensor = self.output_norm(state)
        return features
