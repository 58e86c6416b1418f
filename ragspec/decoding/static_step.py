"""A decode step of fixed shape: what may be recorded once and run again on other numbers.

A step of short segments is padded to a bucket: every slot from the first on, up to a power of two, each with the same number of
tokens, over the same context. So its shapes follow from the bucket alone, packing falls away, and all that differs from step to
step are four rows of small integers in a buffer that stays where it is. The host neither waits in it nor brings
numbers into it. Where states between layers are wanted too, the pass leaves them in buffers of their own.

Padding must not write where anybody reads: idle slots hold the prefixes of finished prompts. It goes to the place that each
slot has behind its capacity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.decoding.attention import Plan, Rule, Segment, attend_padded, visibility
from ragspec.decoding.cache import SlotCache
from ragspec.decoding.step_plan import BATCHED_LENGTH, on_host, spans
from ragspec.decoding.target import StepOutput

#: Tokens of each slot in a pass: rows that draft little should not be padded to the longest draft there can be.
WIDTHS = (1, 2, 4, 8, BATCHED_LENGTH)
#: Wider passes take the device longer than launching their kernels takes the host: nothing is gained by recording them.
MOST_TOKENS = 512
#: A bucket has at most so many tokens for each of its step's own. What few sequences in high slots, or a long draft beside
#: short ones, pay beyond that no profile has priced: such steps run kernel by kernel.
MOST_PADDING = 3
#: Contexts are 256, 384, 512, 768, 1024, ... tokens, two to the octave: attention reads a fifth too much on average.
LEAST_CONTEXT = 256


class Computed(NamedTuple):
    """What a model's forward pass over a plan gives.

    Attributes:
        logits: of the wanted rows, [r, vocabulary].
        hidden: their final hidden states, [r, hidden].
        features: by layer asked for, its input at every token of the pass, [n, hidden]; see `Target.forward`.
    """

    logits: Tensor
    hidden: Tensor
    features: Mapping[int, Tensor]


#: A model's forward pass over a plan, and the layers whose inputs it shall give.
Compute = Callable[[Plan, Sequence[int]], Computed]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a step.

    Attributes:
        rows: slots, from the first on.
        width: tokens of each.
        context: places of each slot that are looked at.
        features: layers whose inputs the pass gives.
    """

    rows: int
    width: int
    context: int
    features: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Of a pass, padding included."""
        return self.rows * self.width


def bucket_of(segments: Sequence[Segment], slots: int, capacity: int, features: tuple[int, ...] = ()) -> Bucket | None:
    """The least bucket that holds a step, or None where a segment is long, or the bucket too wide or mostly padding.

    Args:
        segments: the step's.
        slots: of the cache.
        capacity: tokens a slot holds.
        features: layers whose inputs are wanted.
    """
    longest = max(s.length for s in segments)
    if longest > BATCHED_LENGTH:
        return None
    used = max(s.slot for s in segments) + 1
    rows = min(slots, 1 << (used - 1).bit_length())
    width = next(width for width in WIDTHS if width >= longest)
    bucket = Bucket(rows, width, min(capacity, padded_context(max(s.end for s in segments))), features)
    most = min(MOST_TOKENS, MOST_PADDING * sum(s.length for s in segments))
    return bucket if bucket.tokens <= most else None


def padded_context(reached: int) -> int:
    """Places of a slot that a bucket looks at whose longest segment ends at `reached`; a slot may hold fewer."""
    octave = max(LEAST_CONTEXT, 1 << (reached - 1).bit_length())
    between = octave * 3 // 4
    return between if octave > LEAST_CONTEXT and reached <= between else octave


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the static steps over a cache leave what they give, all in the same place.

    Attributes:
        logits: [rows, vocabulary].
        choices: [rows].
        normalizers: [rows].
        hidden: [rows, hidden].
        features: by layer, its input at every token of a pass, [rows, hidden]; made for the first step that asks.
    """

    logits: Tensor
    choices: Tensor
    normalizers: Tensor
    hidden: Tensor
    features: dict[int, Tensor] = field(default_factory=dict)

    def reserve(self, features: Sequence[int]) -> None:
        """Make room for the inputs of these layers."""
        for layer in features:
            if layer not in self.features:
                self.features[layer] = torch.zeros_like(self.hidden)

    def put(self, given: Computed) -> None:
        """Take what a pass gives, on the device and in place."""
        logits, count = given.logits, len(given.logits)
        self.logits[:count].copy_(logits)
        self.choices[:count].copy_(logits.argmax(-1))
        self.normalizers[:count].copy_(logits.float().logsumexp(-1))
        self.hidden[:count].copy_(given.hidden)
        for layer, states in given.features.items():
            self.features[layer][: len(states)].copy_(states)

    def take(self, rows: int, *, hidden: bool) -> StepOutput:
        """The first so many rows, as a copy: the next pass writes over them."""
        behind = self.hidden[:rows].clone() if hidden else None
        return StepOutput(
            self.logits[:rows].clone(), self.choices[:rows].clone(), self.normalizers[:rows].clone(), behind
        )

    def take_features(self, features: Sequence[int], places: Tensor) -> Tensor:
        """The inputs of layers at places of the pass [n], as a copy, [n, layers, hidden]."""
        return torch.stack([self.features[layer][places] for layer in features], 1)


def make_outputs(slots: int, vocabulary: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Outputs:
    """Outputs of as many rows as the widest pass over so many slots has."""
    rows = min(MOST_TOKENS, slots * BATCHED_LENGTH)
    return Outputs(
        torch.zeros((rows, vocabulary), dtype=dtype, device=device),
        torch.zeros(rows, dtype=torch.long, device=device),
        torch.zeros(rows, dtype=torch.float32, device=device),
        torch.zeros((rows, hidden), dtype=dtype, device=device),
    )


class StaticStep:
    """A bucket's buffers, and the pass over them. At first they hold padding alone, which writes nothing that is read.

    Make, fill and run it under `torch.inference_mode()`: what was made under it can be written nowhere else.

    Args:
        bucket: the shape.
        cache: where the sequences live. Not held: whoever records over a cache would else keep it.
        outputs: where results go, those of other buckets too.
        dtype: of the attention bias, the model's own.

    Raises:
        torch.OutOfMemoryError: the buffers do not fit in the device's memory.
        ReferenceError: by `run`, where the cache is gone.
    """

    def __init__(self, bucket: Bucket, cache: SlotCache, outputs: Outputs, dtype: torch.dtype) -> None:
        self.bucket = bucket
        self.device = outputs.logits.device
        self._cache: SlotCache = weakref.proxy(cache)
        self._capacity = cache.capacity
        self._outputs = outputs
        self._dtype = dtype
        outputs.reserve(bucket.features)
        self._inputs = torch.zeros((4, bucket.tokens), dtype=torch.long, device=self.device)
        self._slots = torch.arange(bucket.rows, device=self.device).repeat_interleave(bucket.width)
        self._padded: list[int] = []  # where the pass has each of the step's tokens
        self.fill((), (), ())

    def fill(self, segments: Sequence[Segment], tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Put a step's numbers where the pass reads them, in one transfer.

        Args:
            segments: short ones, in slots of the bucket, in packed order.
            tokens: their new tokens.
            rows: packed places whose logits are wanted.
        """
        count, width = self.bucket.tokens, self.bucket.width
        # Padding is token 0 and looks at position 0 of its slot: finite, and thrown away.
        ids, positions, places, wanted = [0] * count, [0] * count, [self._capacity] * count, [0] * count
        padded: list[int] = []
        for segment, here in zip(segments, spans(segments, 0, width), strict=True):
            ids[here] = tokens[len(padded) : len(padded) + segment.length]
            positions[here] = places[here] = range(segment.start, segment.end)
            padded += range(here.start, here.stop)
        wanted[: len(rows)] = [padded[row] for row in rows]
        self._padded = padded
        numbers = on_host((ids, positions, places, wanted), self.device)
        self._inputs.copy_(numbers.view(4, count), non_blocking=True)

    def run(self, compute: Compute) -> None:
        """The pass: read the inputs, write cache and outputs."""
        plan = StaticPlan(self._cache, self.bucket, self._inputs, self._slots, self._dtype)
        self._outputs.put(compute(plan, self.bucket.features))

    def output(self, rows: int, *, hidden: bool) -> StepOutput:
        """What the last pass gave for the first so many wanted rows, and of the bucket's layers for every token."""
        found = self._outputs.take(rows, hidden=hidden)
        if not self.bucket.features:
            return found
        places = on_host((self._padded,), self.device).to(self.device, non_blocking=True)
        return replace(found, features=self._outputs.take_features(self.bucket.features, places))


class StaticPlan:
    """The plan of a padded step; made within the pass, so that what it computes is computed anew each time.

    Args:
        cache: where the sequences live.
        bucket: the shape.
        inputs: tokens, positions, places and wanted rows, int64 [4, rows * width].
        slots: of each token, int64 [rows * width].
        dtype: of the attention bias.
    """

    def __init__(self, cache: SlotCache, bucket: Bucket, inputs: Tensor, slots: Tensor, dtype: torch.dtype) -> None:
        self.cache = cache
        self.slots = slots
        self.tokens, self.positions, self.places, self.rows = inputs.unbind()
        self._bucket = bucket
        self._dtype = dtype
        self._bias: dict[int | None, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, rule: Rule) -> Tensor:
        """See `Plan.attend`."""
        keys, values = self.cache.read(layer, 0, self._bucket.rows, self._bucket.context)
        if rule.window not in self._bias:
            ends = self.positions.view(self._bucket.rows, self._bucket.width)
            self._bias[rule.window] = visibility(ends, self._bucket.context, rule.window, self._dtype)
        return attend_padded(queries, keys, values, self._bias[rule.window], rule)
