"""What a row asks, or why it cannot be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from producer.openai import is_batch_line, unpack
from producer.refusal import NotAskableError
from ragspec.jobs.options import MAX_QUESTION_CHARS, AnswerOptions, RowOptions
from ragspec.jobs.row import ParsedRow, RowFault

#: Names of the question's field; the first that a row has counts.
QUESTION_FIELDS = ("question", "query", "prompt", "text")
#: Names of the id's field; the first that a row has counts.
ID_FIELDS = ("custom_id", "id")
OPTION_FIELDS = tuple(RowOptions.model_fields)
#: Every field that is read; others are passed over.
KNOWN_FIELDS = frozenset((*QUESTION_FIELDS, *ID_FIELDS, *OPTION_FIELDS, "method", "url", "body"))
#: Longest id: an index entry must hold it.
MAX_ID_CHARS = 512


def parse_row(line: int, fields: Mapping[str, Any]) -> ParsedRow | RowFault:
    """Judge one row."""
    custom_id: str | None = None
    try:
        custom_id = _custom_id(fields)
        if is_batch_line(fields):
            question, wanted = unpack(fields)
        else:
            question = _question(fields)
            wanted = {name: fields[name] for name in OPTION_FIELDS if fields.get(name) is not None}
        return ParsedRow(line, custom_id or f"row-{line:06d}", _checked(question), _options(wanted))
    except NotAskableError as fault:
        return RowFault(line, fault.code, fault.message, fault.advice, custom_id)


def fitted(row: ParsedRow, job: AnswerOptions) -> ParsedRow | RowFault:
    """The row, unless its least length lies above its greatest, either of which may be the job's."""
    whose = {name: "row" if name in row.row_options else "job" for name in ("min_tokens", "max_tokens")}
    least, most = (row.row_options.get(name, getattr(job, name)) for name in whose)
    if least <= most:
        return row
    return RowFault(
        row.line,
        "bad_option",
        f"min_tokens: the {whose['min_tokens']}'s {least} is more than max_tokens, the {whose['max_tokens']}'s {most}.",
        "Lower the one, or give the row the other too.",
        row.custom_id,
    )


def _custom_id(fields: Mapping[str, Any]) -> str | None:
    for name in ID_FIELDS:
        given = fields.get(name)
        if given is None or given == "":
            continue
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise NotAskableError("bad_custom_id", f"{name} is neither text nor a whole number.")
        custom_id = str(given)
        if len(custom_id) > MAX_ID_CHARS:
            raise NotAskableError("bad_custom_id", f"{name} has more than {MAX_ID_CHARS} characters.")
        _require_storable(name, custom_id)
        return custom_id
    return None


def _question(fields: Mapping[str, Any]) -> str:
    for name in QUESTION_FIELDS:
        given = fields.get(name)
        if isinstance(given, str):
            return given
        if given is not None:
            raise NotAskableError("missing_question", f"{name} is not text.", "Write the question as a string.")
    raise NotAskableError(
        "missing_question", "The row has no question.", f"Put it into a field {', '.join(QUESTION_FIELDS)}."
    )


def _checked(question: str) -> str:
    question = question.strip()
    if not question:
        raise NotAskableError("empty_question", "The question is empty.", "Write one, or leave the row out.")
    if len(question) > MAX_QUESTION_CHARS:
        raise NotAskableError(
            "question_too_long",
            f"The question has {len(question)} characters.",
            f"At most {MAX_QUESTION_CHARS} are taken.",
        )
    _require_storable("The question", question)
    return question


def _require_storable(what: str, written: str) -> None:
    if "\0" in written or any("\ud800" <= character <= "\udfff" for character in written):
        raise NotAskableError("bad_character", f"{what} holds a NUL or half a surrogate pair.", "Remove it.")


def _options(wanted: dict[str, Any]) -> dict[str, Any]:
    if isinstance(wanted.get("stop"), str):
        wanted["stop"] = [wanted["stop"]]
    try:
        options = RowOptions.model_validate(wanted)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"])
        raise NotAskableError("bad_option", f"{field}: {fault['msg'].removeprefix('Value error, ')}.") from None
    for stop in options.stop or ():
        if not stop:
            raise NotAskableError("bad_option", "stop: an empty string would end every answer at once.")
        _require_storable("stop", stop)
    return options.model_dump(mode="json", exclude_none=True)
