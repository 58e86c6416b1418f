"""Capture and replay of CUDA graphs.

A decode step of a small model is some hundred short kernels, and the host takes longer to launch them than the device to run
them. A graph is launched at once. See "CUDA Graphs" in torch's notes on CUDA semantics for what a capture must keep to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property

import torch

from ragspec.decoding.recorder import Replay

#: Passes before a capture, as torch's notes have it: libraries make their handles and workspaces in the first.
WARM_UPS = 3


class GraphRecorder:
    """Records functions as CUDA graphs, which share one memory pool: none is replayed while another is.

    Args:
        device: CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        """Where all is warmed up and captured: cuBLAS keeps a workspace for every stream that it has seen, for good."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Replay:
        """See `Recorder.record`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            # Where a capture fails, torch's own context manager may leave its stream the current one; this one puts it back.
            with torch.cuda.stream(current):
                graph = self._capture(run, current)
        self._graphs.add(graph)
        return graph.replay

    def settle(self) -> None:
        """See `Recorder.settle`: what fails on the device is told at the next call that waits for it."""
        torch.cuda.synchronize(self._device)

    def _capture(self, run: Callable[[], None], current: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                for _ in range(WARM_UPS):
                    run()
        finally:
            current.wait_stream(self._side)
        # The pool of a graph that lives: torch lets a pool go with the last graph in it.
        pool = next((graph.pool() for graph in self._graphs), None)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, as the embedder may, must not spoil the capture.
        with torch.cuda.graph(graph, pool=pool, stream=self._side, capture_error_mode="thread_local"):
            run()
        return graph
