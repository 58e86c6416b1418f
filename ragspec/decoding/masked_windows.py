"""Windows that a model's own attention keeps to by its mask alone: ours reads no mask, and has to end before they matter."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ragspec.decoding.attention import Rule, Segment, attending
from ragspec.decoding.cache import SlotCache
from ragspec.decoding.step_plan import StepPlan


class _Listener(StepPlan):
    """The plan of one token, which keeps the window that each layer's attention call names."""

    def __init__(self, model: PreTrainedModel) -> None:
        cache = SlotCache(slots=1, capacity=1)
        super().__init__(cache, [Segment(0, 0, 1)], [0], [0], device=model.device, dtype=model.dtype)
        self.named: dict[int, int | None] = {}

    def attend(self, layer: int, queries: Tensor, rule: Rule) -> Tensor:
        """See `Plan.attend`."""
        self.named[layer] = rule.window
        return super().attend(layer, queries, rule)


@torch.inference_mode()
def masked_window(model: PreTrainedModel) -> int | None:
    """The least window, in tokens, of the layers that have one by the model's config and do not name it when they attend.

    What the config says is read off the cache that transformers' `generate` makes of it, which keeps no more of a layer than it
    may see: `sliding_window` of sliding layers, `attention_chunk_size` of chunked ones. A window of w tokens is the token
    itself and w - 1 before it, and a chunk begins at every w-th token: in a text of w tokens neither hides anything.

    Args:
        model: a causal LM whose attention implementation is ours.

    Returns:
        None where no such layer is: all that have a window name it.
    """
    plan = _Listener(model)
    with attending(plan):
        model(input_ids=plan.tokens[None], position_ids=plan.positions[None], use_cache=False)
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]
    masked = [window for layer, window in enumerate(windows) if window and plan.named.get(layer) is None]
    return min(masked, default=None)
