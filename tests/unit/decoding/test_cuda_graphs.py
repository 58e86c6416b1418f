"""What `GraphRecorder` asks of torch.cuda, by a stand-in for it: no card is needed, and none is proven."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from ragspec.decoding.cuda_graphs import WARM_UPS, GraphRecorder


class Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Graph:
    """Has the pool that it was captured into."""

    def __init__(self) -> None:
        self._pool: object = None

    def pool(self) -> object:
        return self._pool

    def replay(self) -> None:
        self._log.append("replay")


class Card:
    """Stands for `torch.cuda`; its captures end as torch's do, which leave their stream current where they fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pools: list[object] = []
        self.streams = 0
        self.current = self.main = Stream(self.log, "main")
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.cuda, "Stream", self.make_stream)
        patch.setattr(torch.cuda, "synchronize", lambda device: self.log.append(f"wait for {device}"))
        patch.setattr(torch.cuda, "stream", self.switch)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        known = inspect.signature(torch.cuda.graph)
        patch.setattr(torch.cuda, "graph", lambda *args, **given: self.capture(**known.bind(*args, **given).arguments))

    def make_stream(self) -> Stream:
        self.streams += 1
        return Stream(self.log, "side")

    @contextmanager
    def switch(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, cuda_graph: Any, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.current = self.current, stream
        self.log.append(f"capture on {stream.name}")
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        cuda_graph._pool = object() if pool is None else pool
        cuda_graph._log = self.log
        self.pools.append(cuda_graph._pool)
        self.current = before

    def run(self) -> None:
        self.log.append(f"run on {self.current.name}")


def test_a_function_is_warmed_up_beside_the_main_stream_and_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)

    replay = GraphRecorder(torch.device("cuda")).record(card.run)
    recorded = list(card.log)
    replay()

    warm = ["side waits for main", *["run on side"] * WARM_UPS, "main waits for side"]
    assert recorded == [*warm, "capture on side", "run on side"]
    assert card.log[len(recorded) :] == ["replay"]
    assert card.current is card.main


def test_graphs_share_a_pool_while_one_of_them_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last graph torch lets the pool go, and its handle is worth nothing."""
    card = Card(monkeypatch)
    recorder = GraphRecorder(torch.device("cuda"))

    kept = [recorder.record(card.run) for _ in range(3)]
    kept.clear()
    gc.collect()
    recorder.record(card.run)

    assert card.pools[0] is card.pools[1] is card.pools[2]
    assert card.pools[3] is not card.pools[0]


@pytest.mark.parametrize("at", [1, WARM_UPS + 1])
def test_where_recording_fails_the_current_stream_is_what_it_was(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the warm-up or in the capture; the next step waits for what ran beside it."""
    card = Card(monkeypatch)

    def fail() -> None:
        card.run()
        if sum(line.startswith("run") for line in card.log) == at:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        GraphRecorder(torch.device("cuda")).record(fail)
    assert card.current is card.main
    assert "main waits for side" in card.log


def test_all_recordings_share_a_stream_which_is_made_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries keep a workspace for every stream that they have seen."""
    card = Card(monkeypatch)
    recorder = GraphRecorder(torch.device("cuda"))
    made = [card.streams]
    for _ in range(3):
        recorder.record(card.run)
        made.append(card.streams)

    assert made == [0, 1, 1, 1]


def test_settling_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what a replay did wrong is told."""
    card = Card(monkeypatch)

    GraphRecorder(torch.device("cuda:1")).settle()

    assert card.log == ["wait for cuda:1"]
