"""What a gateway asks a worker. This file imports neither torch nor SQLAlchemy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ragspec.jobs.options import MAX_QUESTION_CHARS, AnswerOptions

#: The pub/sub channel in which a gateway names, by id, questions that nobody waits for any more.
CANCELLED = "ragspec:asks:cancelled"


def gone_key(name: str) -> str:
    """The key that a gateway sets, until the deadline, beside its word in `CANCELLED`: for a question no worker has yet."""
    return f"ragspec:asks:gone:{name}"


class AskMessage(BaseModel):
    """One question that somebody waits for.

    Attributes:
        id: unique among all gateways; names it in events and cancellations.
        question: its text.
        options: what it is answered with; their `queue` is `interactive`.
        stream: whether tokens are told as they are verified, not with the answer alone.
        reply_to: key of the Redis stream that the events go to.
        sent_at: when it was asked, seconds since the epoch by the gateway's clock.
        deadline: when nobody will wait any more, by the same clock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1, max_length=64)
    question: str = Field(min_length=1, max_length=MAX_QUESTION_CHARS)
    options: AnswerOptions
    stream: bool = False
    reply_to: str
    sent_at: float
    deadline: float
