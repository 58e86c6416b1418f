"""The resident process: load everything once, then serve until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from ragspec.settings import Settings
from worker.resident.parts import Parts
from worker.resident.pipeline import Pipeline
from worker.resident.server import Server

if TYPE_CHECKING:
    from ragspec.decoding.step_cost import StepProfile
    from ragspec.decoding.target import Target

log = logging.getLogger(__name__)

#: sysexits EX_SOFTWARE: the engine failed; the supervisor starts another.
ENGINE_FAILED = 70
#: Seconds that an engine step or a retrieval under way may still take when the process is to stop.
STOP_TIMEOUT_S = 5.0


def serve(path: Path, settings: Settings, load: Callable[[Settings], Parts]) -> int:
    """Load, then serve on the Unix socket at `path` until SIGTERM or SIGINT; returns the exit status."""
    parts = load(settings)
    return asyncio.run(_serve(path, settings, parts))


def load_parts(settings: Settings) -> Parts:
    """Load target, embedder, retriever and prompt template as the settings say.

    Raises:
        ModelUnavailableError: a model cannot be had.
        ServiceUnavailableError: Chroma is not configured.
    """
    from ragspec.corpus.embedder import load_embedder
    from ragspec.corpus.retriever import load_retriever
    from ragspec.decoding.engine import Engine
    from ragspec.decoding.loading import load_configured
    from ragspec.prompt.builder import PromptBuilder

    target = load_configured(settings)
    window = min(settings.context_window, target.context_window)
    return Parts(
        engine=Engine(
            target,
            max_batch=settings.max_batch,
            context_window=window,
            prefill_chunk=settings.prefill_chunk,
            max_draft=settings.max_draft,
            prefix_cache=settings.prefix_cache,
            step_profile=_step_profile(target, settings, window),
        ),
        retriever=load_retriever(settings, load_embedder(settings)),
        # A tokenizer of its own: prompts are encoded in another thread than the engine decodes in, and Rust tokenizers
        # refuse to be changed while they are read ("Already borrowed", huggingface/transformers#47085).
        prompts=PromptBuilder(deepcopy(target.tokenizer), window, settings.prompt_template, settings.passage_order),
        model=target.identity,
    )


def _step_profile(target: Target, settings: Settings, window: int) -> StepProfile:
    """What steps take here; not asked where nothing is drafted."""
    from ragspec.decoding.profiling import profile_steps
    from ragspec.decoding.step_cost import FREE

    return profile_steps(target, max_batch=settings.max_batch, window=window) if settings.max_draft else FREE


async def _serve(path: Path, settings: Settings, parts: Parts) -> int:
    server = Server(parts.model)
    pipeline = Pipeline(
        parts,
        max_batch=settings.max_batch,
        answer_without_context=settings.on_no_context == "answer",
        deliver=server.deliver,
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
