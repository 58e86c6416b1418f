"""One family of errors: a code a machine can read, a sentence a person can act on, an exit status a script can test."""

from __future__ import annotations

from typing import ClassVar


class RagspecError(Exception):
    """Something the user can act on.

    Args:
        message: one sentence that names the row, field, setting or service at fault.
        advice: what to do about it, one sentence, or empty.
        code: overrides the class's own code where one class covers several cases.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, advice: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.error_code = code or self.code

    def __str__(self) -> str:
        return f"{self.message} {self.advice}".rstrip()


class InputError(RagspecError):
    """The user's file or text cannot be used as it is (sysexits EX_DATAERR)."""

    code = "bad_input"
    exit_status = 65


class NotFoundError(RagspecError):
    """A job, collection, file or answer that does not exist (EX_NOINPUT)."""

    code = "not_found"
    exit_status = 66


class ServiceUnavailableError(RagspecError):
    """Redis, PostgreSQL, Chroma or the engine does not answer (EX_UNAVAILABLE)."""

    code = "service_unavailable"
    exit_status = 69


class RefusedError(RagspecError):
    """A service answered, and refused: asking the same again is no use (EX_UNAVAILABLE)."""

    code = "service_refused"
    exit_status = 69


class ConflictError(RagspecError):
    """The request does not fit the present state: cancel of a finished job, a second `up` (EX_CANTCREAT)."""

    code = "conflict"
    exit_status = 73


class ModelUnavailableError(RagspecError):
    """A model that cannot be had or used; the message lists what was tried (EX_UNAVAILABLE)."""

    code = "model_unavailable"
    exit_status = 69


class SettingsError(RagspecError):
    """A setting is missing or wrong (EX_CONFIG)."""

    code = "bad_setting"
    exit_status = 78
