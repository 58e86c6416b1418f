"""What went wrong, in HTTP: one form for all of ours, OpenAI's below `/v1`."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from producer.refusal import NotAskableError
from ragspec.errors import ConflictError, InputError, NotFoundError, RagspecError, ServiceUnavailableError

BAD_JSON, TOO_LARGE = "bad_json", "body_too_large"
#: Of statuses that are not ours.
_CODE_OF_STATUS = {400: BAD_JSON, 404: "not_found", 405: "method_not_allowed", 413: TOO_LARGE}
#: Codes of answers that failed for what the question asks, and their statuses. Others are 500, the worker's own failures.
_STATUS_OF_CODE = {
    "unknown_collection": 404,
    "model_not_found": 404,
    "prompt_too_long": 422,
    "question_too_long": 422,
    "bad_option": 422,
    "bad_row_option": 422,
    "bad_template": 422,
    "embedder_mismatch": 409,
    TOO_LARGE: 413,
    "retrieval_failed": 503,
    "engine_lost": 503,
    "service_unavailable": 503,
    "deadline_exceeded": 504,
}


class GatewayError(RagspecError):
    """An error whose status is that of its code, or given.

    Args:
        message: one sentence.
        advice: what to do about it.
        code: for machines.
        status: HTTP's.
    """

    def __init__(self, message: str, advice: str = "", *, code: str, status: int | None = None) -> None:
        super().__init__(message, advice, code=code)
        self.status = status or _STATUS_OF_CODE.get(code, 500)


def status_of(error: RagspecError) -> int:
    """The status of any of our errors."""
    if isinstance(error, GatewayError):
        return error.status
    if (known := _STATUS_OF_CODE.get(error.error_code)) is not None:
        return known
    kinds = ((InputError, 422), (NotFoundError, 404), (ConflictError, 409), (ServiceUnavailableError, 503))
    return next((status for kind, status in kinds if isinstance(error, kind)), 500)


def payload(path: str, status: int, code: str, message: str, advice: str = "") -> dict[str, Any]:
    """The body of an error."""
    if path.startswith("/v1/"):
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": f"{message} {advice}".rstrip(), "type": kind, "param": None, "code": code}}
    return {"error": {"code": code, "message": message, "hint": advice}}


async def on_ragspec_error(request: Request, error: Exception) -> JSONResponse:
    """One of ours."""
    assert isinstance(error, RagspecError)  # noqa: S101 - registered for these
    status = status_of(error)
    headers = {"Retry-After": "1"} if status == 503 else None
    body = payload(request.url.path, status, error.error_code, error.message, error.advice)
    return JSONResponse(body, status, headers)


async def on_not_askable(request: Request, error: Exception) -> JSONResponse:
    """A body of OpenAI's form that asks for what cannot be done."""
    assert isinstance(error, NotAskableError)  # noqa: S101 - registered for these
    return JSONResponse(payload(request.url.path, 400, error.code, error.message, error.advice), 400)


async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """A body that does not fit its model: the first field at fault is named."""
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for these
    path, fault = request.url.path, error.errors()[0]
    if fault["type"] == "json_invalid":
        return JSONResponse(payload(path, 400, BAD_JSON, f"The body is no JSON: {fault['ctx']['error']}."), 400)
    field = ".".join(str(part) for part in fault["loc"][1:])
    if not field and "json" not in request.headers.get("content-type", ""):
        message, advice = "The body is not declared as JSON.", "Send `Content-Type: application/json`."
        return JSONResponse(payload(path, 415, "bad_content_type", message, advice), 415)
    message = f"{field or 'The body'}: {fault['msg'].removeprefix('Value error, ')}."
    return JSONResponse(payload(path, 422, "bad_request", message), 422)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods, and bodies that FastAPI does not read to their end."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these
    code = _CODE_OF_STATUS.get(error.status_code, "http_error")
    body = payload(request.url.path, error.status_code, code, f"{error.detail}.")
    return JSONResponse(body, error.status_code, dict(error.headers or {}))
