"""The resident process: load everything once, then serve until told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

from ragspec.settings import Settings
from worker.resident.parts import Parts
from worker.resident.pipeline import Pipeline
from worker.resident.server import Server

log = logging.getLogger(__name__)

#: sysexits EX_SOFTWARE: the engine failed; the supervisor starts another.
ENGINE_FAILED = 70
#: Seconds that an engine step or a retrieval under way may still take when the process is to stop.
STOP_TIMEOUT_S = 5.0


def serve(path: Path, settings: Settings, load: Callable[[Settings], Parts]) -> int:
    """Load, then serve on the Unix socket at `path` until SIGTERM or SIGINT; returns the exit status."""
    parts = load(settings)
    # What is loaded stays: a million objects, which a full collection would look through for a tenth of a second each time.
    gc.collect()
    gc.freeze()
    return asyncio.run(_serve(path, settings, parts))


def load_parts(settings: Settings) -> Parts:
    """Load target, embedder, retriever and prompt template as the settings say.

    Raises:
        ModelUnavailableError: a model cannot be had.
        ServiceUnavailableError: Chroma is not configured.
    """
    from ragspec.assembly import make_drafters, make_engine
    from ragspec.corpus.embedder import load_embedder
    from ragspec.corpus.retriever import load_retriever
    from ragspec.decoding.head_drafter import HeadDrafter
    from ragspec.decoding.loading import load_configured
    from ragspec.decoding.streaming import TextStream
    from ragspec.prompt.builder import PromptBuilder

    target = load_configured(settings)
    window = min(settings.context_window, target.context_window)
    drafters = make_drafters(settings, target)
    return Parts(
        engine=make_engine(settings, target, drafters=drafters),
        retriever=load_retriever(settings, load_embedder(settings)),
        # A tokenizer of its own: prompts are encoded in another thread than the engine decodes in, and Rust tokenizers
        # refuse to be changed while they are read ("Already borrowed", huggingface/transformers#47085).
        prompts=PromptBuilder(deepcopy(target.tokenizer), window, settings.prompt_template, settings.passage_order),
        model=target.identity,
        # In the engine's thread, as the engine's own tokenizer is.
        stream=lambda stops: TextStream(target.tokenizer, stops),
        head=next((drafter.identity for drafter in drafters if isinstance(drafter, HeadDrafter)), None),
    )


async def _serve(path: Path, settings: Settings, parts: Parts) -> int:
    server = Server(parts.model)
    pipeline = Pipeline(
        parts,
        max_batch=settings.max_batch,
        answer_without_context=settings.on_no_context == "answer",
        deliver=server.deliver,
        tell=server.tell,
        fail=server.fail,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    pipeline.start()
    try:
        await server.run(path, pipeline)
    except Exception as error:  # noqa: BLE001 - whatever broke the engine: it is logged, and a new process is the cure
        log.critical("stopping: %s: %s", type(error).__name__, error)
        _leave(ENGINE_FAILED)
    if not pipeline.stop(STOP_TIMEOUT_S):
        _leave(0)
    return 0


def _leave(status: int) -> None:
    """End at once: a thread inside the engine cannot be stopped, and must not meet a dying interpreter."""
    logging.shutdown()
    os._exit(status)
