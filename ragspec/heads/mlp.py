"""Independent MLPs, one for each place of a draft: the simplest head, and the baseline."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from ragspec.heads.architecture import Norm, StateHead, register
from ragspec.heads.shape import HeadShape


@register
class MlpHead(StateHead):
    """Two layers on the last hidden state for each offset, blind to the tokens drafted so far (Medusa, arXiv 2401.10774)."""

    architecture = "mlp"

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        width, inner = shape.hidden, shape.inner
        self.input_norm = Norm(width, shape.epsilon)
        self.up = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(shape.depth))
        self.down = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(shape.depth))
        self.output_norm = nn.ModuleList(Norm(width, shape.epsilon) for _ in range(shape.depth))

    def advance(self, state: Tensor, embedded: Tensor, place: int) -> Tensor:
        """The state stays what the target left behind."""
        del embedded, place
        return state

    def features(self, state: Tensor, place: int) -> Tensor:
        """Those of the MLP of this place; beyond the last, the last one's."""
        place = min(place, self.shape.depth - 1)
        changed = state + self.down[place](functional.silu(self.up[place](self.input_norm(state))))
        features: Tensor = self.output_norm[place](changed)
        return features
