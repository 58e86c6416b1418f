"""A stand-in for CUDA graphs on any device: a tape of tensor operations.

It keeps what a graph keeps, the operations with the tensors they read and write, and loses what a graph loses: every number
that Python computed on the way is as it was when the tape was made. It refuses what a capture refuses: operations whose shape
or result the host must wait for, and numbers that come from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ragspec.decoding.recorder import PlainRecorder, Replay

aten = torch.ops.aten
_WAITED_FOR = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


def _can_be_captured(func: Any, args: tuple[Any, ...]) -> bool:
    if func in _INDEXING:  # by numbers, not by a mask
        return not any(index is not None and index.dtype is torch.bool for index in args[1])
    return func not in {aten.lift_fresh.default, aten.is_nonzero.default} and not _WAITED_FOR.intersection(func.tags)


class Tape(TorchDispatchMode):
    """Records the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if not _can_be_captured(func, args):
            raise RuntimeError(f"{func} cannot be captured")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    @property
    def shapes(self) -> list[tuple[str, list[torch.Size]]]:
        """Each operation and the shapes it gave."""
        return [
            (str(func), [one.shape for one in tree_leaves(out) if isinstance(one, Tensor)])
            for func, _, _, out in self._calls
        ]

    def play(self) -> None:
        """All operations again."""
        now: dict[int, Tensor] = {}

        def present(value: Any) -> Any:
            return now.get(id(value), value)

        for func, args, kwargs, out in self._calls:
            fresh = func(*tree_map(present, args), **tree_map(present, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(fresh), strict=True):
                now[id(old)] = new


class TapeRecorder(PlainRecorder):
    """See `Recorder`."""

    def record(self, run: Callable[[], None]) -> Replay:
        run()
        tape = Tape()
        with tape:
            run()
        return tape.play
