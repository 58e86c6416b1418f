"""What every acceptance record must fulfil."""

from __future__ import annotations

from ragspec.decoding.acceptance import Source
from ragspec.decoding.request import Completion


def check_record(completion: Completion) -> None:
    """The parts of an acceptance record add up as its module says."""
    record = completion.acceptance
    # A step emits a token of the target's behind what it accepts, but for the last where the answer is cut inside its draft.
    cut = record.token_sources[-1] is not Source.TARGET

    assert completion.completion_tokens == 1 + sum(record.per_step_accepted) + record.num_verify_steps - cut
    assert len(record.token_sources) == len(record.token_logprobs) == len(record.token_ids)
    assert record.num_accepted_draft_tokens == sum(s is not Source.TARGET for s in record.token_sources)
    assert sum(record.acceptance_histogram) == record.num_verify_steps
    assert all(a <= d for a, d in zip(record.per_step_accepted, record.per_step_drafted, strict=True))
    assert all(value <= 1e-6 for value in record.token_logprobs)
