"""A resident process' server, in a thread, in front of stand-in parts."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.worker_stand_in import MODEL, StandInEngine, stand_in_parts, wait_until
from worker.resident.pipeline import Pipeline
from worker.resident.server import Server

Serving = Callable[[StandInEngine], Path]


@contextmanager
def _served(path: Path, engine: StandInEngine) -> Iterator[None]:
    stopping = threading.Event()

    async def main() -> None:
        server = Server(MODEL)
        pipeline = Pipeline(
            stand_in_parts(engine),
            max_batch=4,
            answer_without_context=True,
            deliver=server.deliver,
            tell=server.tell,
            fail=server.fail,
        )
        pipeline.start()
        watching = asyncio.get_running_loop().run_in_executor(None, stopping.wait)
        watching.add_done_callback(lambda _: server.stop())
        try:
            await server.run(path, pipeline)
        except RuntimeError:
            stopping.set()  # the engine failed, as the test wanted
        pipeline.stop(5.0)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        wait_until(path.exists)
        yield
    finally:
        stopping.set()
        thread.join()


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Serve an engine; gives the socket."""
    with tempfile.TemporaryDirectory() as folder:
        path, opened = Path(folder) / "engine.sock", []

        def serve(engine: StandInEngine) -> Path:
            context = _served(path, engine)
            context.__enter__()
            opened.append(context)
            return path

        yield serve
        for context in opened:
            context.__exit__(None, None, None)
