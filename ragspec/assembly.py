"""From settings to an engine: the one place that knows which setting is which argument."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.decoding.draft import Drafter
from ragspec.decoding.drafting import feature_readers
from ragspec.decoding.engine import Engine
from ragspec.decoding.lookup import JobDrafter, OwnTextDrafter
from ragspec.decoding.profiling import profile_steps
from ragspec.decoding.step_cost import FREE, StepProfile
from ragspec.decoding.target import Target
from ragspec.heads.loading import load_head_drafter
from ragspec.settings import Settings


def make_drafters(settings: Settings, target: Target) -> list[Drafter]:
    """Lookup in the request's text and its job's answers, and the speculation head where there is one.

    Raises:
        SettingsError: RAGSPEC_HEAD names a head that cannot be had or does not fit.
    """
    if not settings.max_draft:
        return []
    drafters: list[Drafter] = [OwnTextDrafter(), JobDrafter()]
    head = load_head_drafter(settings.head, target)
    return drafters if head is None else [*drafters, head]


def make_engine(
    settings: Settings,
    target: Target,
    *,
    max_batch: int | None = None,
    context_window: int | None = None,
    prefill_chunk: int | None = None,
    prefix_cache: float | None = None,
    drafters: Sequence[Drafter] | None = None,
    step_profile: StepProfile | None = None,
) -> Engine:
    """An engine as a worker would have it; arguments take the place of settings.

    Args:
        settings: RAGSPEC_*.
        target: the decoder.
        max_batch: sequences decoded together.
        context_window: tokens of prompt and answer.
        prefill_chunk: prompt tokens of a step.
        prefix_cache: share of the free memory for prefixes.
        drafters: who drafts; default as `make_drafters` says.
        step_profile: what steps take; default it is timed now, unless nothing is to be drafted.

    Raises:
        SettingsError: see `make_drafters` and `Engine`.
    """
    batch = settings.max_batch if max_batch is None else max_batch
    window = min(settings.context_window if context_window is None else context_window, target.context_window)
    drafting = make_drafters(settings, target) if drafters is None else drafters
    if step_profile is None:
        readers = feature_readers(drafting)
        step_profile = (
            profile_steps(target, max_batch=batch, window=window, beside=readers) if settings.max_draft else FREE
        )
    return Engine(
        target,
        max_batch=batch,
        context_window=window,
        prefill_chunk=settings.prefill_chunk if prefill_chunk is None else prefill_chunk,
        max_draft=settings.max_draft,
        drafters=drafting,
        prefix_cache=settings.prefix_cache if prefix_cache is None else prefix_cache,
        step_profile=step_profile,
    )
