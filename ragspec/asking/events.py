"""What a gateway hears of a question, in order: `Started`, any number of `Delta`, then `Finished` or `Rejected`.

A worker that stops hands its questions to another, which starts from the beginning: a second `Started` follows, and `Delta`s
that say again what was said. Their `start` tells; with the same options and seed the tokens are the same.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ragspec.jobs.answer import Answer

#: Key of a gateway's stream, before its own name. Each entry has the fields `id`, a question's, and `event`, JSON.
REPLIES = "ragspec:asks:replies:"
#: Events kept of one gateway, about; it reads them at once, so that more are left only where it is gone.
KEPT_EVENTS = 20_000
#: Seconds after its last event that a stream is kept.
KEPT_S = 600


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Started(_Event):
    """A worker has taken it.

    Attributes:
        worker: who.
        model: the target, `name@fingerprint`.
    """

    kind: Literal["started"] = "started"
    worker: str
    model: str


class Delta(_Event):
    """What one or more steps added to the answer; only where `stream` was asked for.

    Attributes:
        start: how many tokens stand before these.
        tokens: their ids.
        sources: who proposed each, by name, as in acceptance records.
        text: what became certain of the answer's text: characters that a later token may still change, or that may
            belong to a stop string, come with it. All texts together are the answer's.
    """

    kind: Literal["delta"] = "delta"
    start: int
    tokens: list[int]
    sources: list[str]
    text: str

    def followed_by(self, other: Delta) -> Delta:
        """Both as one; `other` begins where this one ends."""
        return Delta(
            start=self.start,
            tokens=[*self.tokens, *other.tokens],
            sources=[*self.sources, *other.sources],
            text=self.text + other.text,
        )


class Finished(_Event):
    """The answer, or the coded reason why there is none; it was the last event."""

    kind: Literal["finished"] = "finished"
    answer: Answer


class Rejected(_Event):
    """It will not be answered: its deadline is past, or no engine took it; it was the last event.

    Attributes:
        code: `deadline_exceeded`, `cancelled`, or `engine_lost`.
        message: a sentence.
    """

    kind: Literal["rejected"] = "rejected"
    code: str
    message: str


Event = Annotated[Started | Delta | Finished | Rejected, Field(discriminator="kind")]
EVENTS: TypeAdapter[Started | Delta | Finished | Rejected] = TypeAdapter(Event)
