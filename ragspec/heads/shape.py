"""The numbers that heads are built by. This file imports no torch: a head's card is checked before any of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Beyond any width, depth or vocabulary.
MOST = 10_000_000
#: The architecture of heads that attend.
ATTENTION = "attention"
#: Ways to turn by position whose angles depend on nothing but the position (transformers' modeling_rope_utils.py).
STEADY_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The numbers of a head that attends, beside those of `HeadShape`.

    Attributes:
        heads: of its queries.
        key_heads: of its keys and values.
        head_dim: of each.
        width: of its layer; the target's where it borrows the target's embeddings or output rows.
        layers: the target's layers whose inputs it reads; none: a low, a middle and a high one (`feature_layers`).
        rope: how positions turn queries and keys, as transformers' `rope_parameters` say it.
        own_embeddings: tokens that it has embeddings of its own for; 0 where it borrows the target's.
        own_output: whether it has output rows of its own.
    """

    heads: int
    key_heads: int
    head_dim: int
    width: int
    layers: tuple[int, ...] = ()
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    own_embeddings: int = 0
    own_output: bool = False

    @property
    def layer_count(self) -> int:
        """Layers that it reads."""
        return len(self.layers) or 3

    def __post_init__(self) -> None:
        """Refuse what no head can be built by.

        Raises:
            ValueError: names the number.
        """
        counts = {name: getattr(self, name) for name in ("heads", "key_heads", "head_dim", "width")}
        wrong = [name for name, value in counts.items() if type(value) is not int or not 0 < value <= MOST]
        wrong += [] if wrong or self.heads % self.key_heads == 0 else ["key_heads"]
        wrong += [] if wrong or self.head_dim % 2 == 0 else ["head_dim"]
        wrong += [] if all(type(layer) is int and layer >= 0 for layer in self.layers) else ["layers"]
        wrong += [] if type(self.own_embeddings) is int and 0 <= self.own_embeddings <= MOST else ["own_embeddings"]
        wrong += [] if isinstance(self.own_output, bool) else ["own_output"]
        rope = self.rope if isinstance(self.rope, Mapping) else {}
        base = rope.get("rope_theta")
        wrong += [] if isinstance(base, int | float) and 0 < base < math.inf else ["rope"]
        if wrong:
            msg = f"its attention has {', '.join(f'{name}={getattr(self, name)!r}' for name in wrong)}"
            raise ValueError(msg)
        if rope.get("rope_type") not in STEADY_ROPES:
            msg = f"its rope_type is {rope.get('rope_type')!r}, not one of {', '.join(STEADY_ROPES)}"
            raise ValueError(msg)


def feature_layers(shape: AttentionShape, depth: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads in a target of `depth` layers; EAGLE-3's own choice where the head names none."""
    return shape.layers or eagle3_layers(depth)


def eagle3_layers(depth: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, as EAGLE-3 chooses them; the least targets have what there is."""
    return min(2, depth), depth // 2, max(0, depth - 3)


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
        attention: of a head that attends.
    """

    hidden: int
    inner: int
    draft_tokens: tuple[int, ...]
    depth: int = 4
    epsilon: float = 1e-5
    attention: AttentionShape | None = None
