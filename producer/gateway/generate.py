"""`POST /generate`: one question, answered at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict, Field, ValidationError, model_validator

from producer.gateway.access import Caller, caller, own_name
from producer.gateway.answers import Generated, generated
from producer.gateway.errors import payload, status_of
from producer.gateway.services import Services
from producer.gateway.sse import EVENT_STREAM, HEADERS, server_sent
from ragspec.asking.events import Delta, Finished
from ragspec.errors import RagspecError
from ragspec.jobs.options import MAX_QUESTION_CHARS, AnswerOptions, RowOptions

router = APIRouter()
Result = TypeVar("Result")
#: nginx's code for a client that has gone; nobody reads it, but it is counted.
CLIENT_GONE = 499


class GenerateRequest(RowOptions):
    """A question and how to answer it; what is left out is as `ragspec submit` has it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "What does --prune delete?", "collection": "handbook", "top_k": 3}]}
    )

    prompt: str = Field(min_length=1, max_length=MAX_QUESTION_CHARS, description="The question.")
    collection: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Where to look; default RAGSPEC_GATEWAY_COLLECTION or the only one.",
    )
    speculation: bool = True
    stream: bool = Field(default=False, description="Server-sent events, each token as soon as it is verified.")
    timeout: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="Seconds until the answer is not wanted any more; default RAGSPEC_GATEWAY_TIMEOUT.",
    )

    @model_validator(mode="after")
    def _asks(self) -> GenerateRequest:
        if not self.prompt.strip():
            msg = "prompt is blank"
            raise ValueError(msg)
        self.answer_options("any")
        return self

    def answer_options(self, collection: str) -> AnswerOptions:
        """What it is answered with."""
        row = self.model_dump(include=set(RowOptions.model_fields), exclude_none=True)
        try:
            return AnswerOptions(collection=collection, speculation=self.speculation, queue="interactive", **row)
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(map(str, fault["loc"]))
            msg = f"{field}: {fault['msg'].removeprefix('Value error, ')}"
            raise ValueError(msg) from None


@router.post(
    "/generate",
    response_model=Generated,
    summary="Answer one question",
    responses={200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}},
)
async def generate(
    body: GenerateRequest, request: Request, who: Annotated[Caller, Depends(caller)]
) -> Generated | Response:
    """Answer one question from a collection, ahead of bulk jobs.

    With `stream` the answer comes as server-sent events: `token` for what each step added, then `done` with the whole record,
    or `error`. A client that hangs up cancels its question.
    """
    began = time.perf_counter()
    held = who.held
    options = body.answer_options(await who.collection(body.collection))
    patience_s = body.timeout or held.settings.gateway_timeout
    if body.stream:
        events = _events(body, options, patience_s, request.url.path, held, began)
        return StreamingResponse(events, media_type=EVENT_STREAM, headers=HEADERS)
    answer = await unless_gone(request, held.asker.answer(body.prompt, options, patience_s))
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    held.metrics.count(answer)
    return generated(answer, own_name(options.collection), time.perf_counter() - began)


async def _events(
    body: GenerateRequest, options: AnswerOptions, patience_s: float, path: str, held: Services, began: float
) -> AsyncIterator[bytes]:
    try:
        async with aclosing(held.asker.events(body.prompt, options, patience_s, stream=True)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield server_sent(event.model_dump_json(exclude={"kind"}), "token")
                elif isinstance(event, Finished):
                    held.metrics.count(event.answer)
                    whole = generated(event.answer, own_name(options.collection), time.perf_counter() - began)
                    yield server_sent(whole.model_dump_json(), "done")
    except RagspecError as error:
        yield server_sent(payload(path, status_of(error), error.error_code, error.message, error.advice), "error")


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result | None:
    """What `work` gives; None, and `work` is cancelled, where the client hangs up before."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
