"""The acceptance record: for every answer, which token was proposed by whom and what each verify step accepted.

A verify step is one forward pass of one sequence after its prompt: the target reads the last emitted token and
the draft behind it, and emits the accepted part of the draft plus one token of its own (the bonus token, or the
correction where a draft token was refused). The first token of an answer comes out of the prompt's own forward pass and
belongs to no verify step. Hence, for every answer:

    completion tokens           = 1 + sum(per_step_accepted) + number of verify steps - (1 if cut inside a draft)
    num_accepted_draft_tokens   = sum(per_step_accepted) = number of tokens whose source is not TARGET
    num_draft_tokens            = sum(per_step_drafted)
    sum(acceptance_histogram)   = number of verify steps

A request that lost its slot to an interactive one has its prompt and emitted tokens but the newest put back into the cache,
and goes on with an ordinary verify step that reads the newest. Putting back emits nothing, drafts nothing and is no verify
step, so the record adds up as that of a request that was never interrupted.

An answer is cut inside a draft where an end token, a stop string or the token limit lies in the accepted part: what
follows was never emitted and counts as neither accepted nor emitted, but as drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Source(IntEnum):
    """Who proposed an emitted token. The numbers are stored; never renumber."""

    TARGET = 0  # sampled by the target itself: first, bonus and corrected tokens
    PASSAGE = 1  # copied from a retrieved passage
    PROMPT = 2  # copied from the rest of the prompt (question, instructions)
    ANSWER = 3  # copied from the answer's own text so far
    HEAD = 4  # the speculation head
    JOB = 5  # copied from another answer of the same job


@dataclass(frozen=True, slots=True)
class AcceptanceRecord:
    """What speculation did for one answer; field names are vLLM's where it has one.

    Attributes:
        token_ids: emitted tokens, end token included, [n].
        token_sources: `Source` of each, [n].
        token_logprobs: natural log-probability of each under the target's unmodified softmax, [n].
        per_step_drafted: draft tokens offered at each verify step, zeros included, [s].
        per_step_accepted: draft tokens emitted out of them, [s].
    """

    token_ids: tuple[int, ...]
    token_sources: tuple[Source, ...]
    token_logprobs: tuple[float, ...]
    per_step_drafted: tuple[int, ...]
    per_step_accepted: tuple[int, ...]

    @property
    def num_verify_steps(self) -> int:
        """Forward passes after the prompt's, drafted or not."""
        return len(self.per_step_drafted)

    @property
    def num_spec_steps(self) -> int:
        """Verify steps that had at least one draft token."""
        return sum(drafted > 0 for drafted in self.per_step_drafted)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens offered."""
        return sum(self.per_step_drafted)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens emitted."""
        return sum(self.per_step_accepted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verify step, bonus token included, over all verify steps; 0.0 where there was none."""
        return (len(self.token_ids) - 1) / self.num_verify_steps if self.num_verify_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted; 0.0 where nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """How many verify steps accepted 0, 1, 2, ... draft tokens."""
        counts = [0] * (max(self.per_step_accepted, default=-1) + 1)
        for accepted in self.per_step_accepted:
            counts[accepted] += 1
        return tuple(counts)
