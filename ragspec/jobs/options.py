"""What a user may ask of a job, validated once where it enters. This file imports neither torch nor SQLAlchemy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

Queue = Literal["bulk", "interactive"]
#: Longest question taken, in characters: far beyond any window, short of what would stall the validator.
MAX_QUESTION_CHARS = 100_000


def _number(given: Any) -> Any:
    # JSON's true would pass for 1.
    if isinstance(given, bool):
        msg = f"must be a number, not {str(given).lower()}"
        raise ValueError(msg)  # noqa: TRY004 - pydantic makes a validation error of this kind only
    return given


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
TopK = Annotated[Whole, Field(ge=0, le=100)]
MaxTokens = Annotated[Whole, Field(ge=1, le=32_768)]
Temperature = Annotated[Real, Field(ge=0, le=10)]
TopP = Annotated[Real, Field(gt=0, le=1)]
Seed = Annotated[Whole, Field(ge=0, le=2**31 - 1)]
#: What the engine's `Sampling` takes, which says what each means.
MinTokens = Annotated[Whole, Field(ge=0, le=32_768)]
RepetitionPenalty = Annotated[Real, Field(ge=0.01, le=100)]
Penalty = Annotated[Real, Field(ge=-2, le=2)]
LogitBias = dict[Annotated[int, Field(ge=0)], Annotated[Real, Field(ge=-100, le=100)]]


class AnswerOptions(BaseModel):
    """Options of a job; a row may override those that `RowOptions` names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    collection: str
    top_k: TopK = 3
    max_tokens: MaxTokens = 128
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Seed = 0
    stop: tuple[str, ...] = ()
    min_tokens: MinTokens = 0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = {}
    speculation: bool = True
    queue: Queue = "bulk"

    @field_validator("min_tokens")
    @classmethod
    def _reachable(cls, value: int, before: ValidationInfo) -> int:
        most = before.data.get("max_tokens", value)
        if value > most:
            raise ValueError(f"more than max_tokens, which is {most}")
        return value


class RowOptions(BaseModel):
    """What one row of a question file may set for itself; unset means the job's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    top_k: TopK | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: tuple[str, ...] | None = None
    min_tokens: MinTokens | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None

    def merged(self, job: AnswerOptions) -> AnswerOptions:
        """The options this row is answered with."""
        return job.model_copy(update={k: v for k, v in self.model_dump().items() if v is not None})
