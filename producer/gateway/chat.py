"""OpenAI's chat completions over the same path; what ragspec adds stands in the field `ragspec`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Body, Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError

from producer.gateway.access import Caller, caller, own_name
from producer.gateway.answers import acceptance, usage
from producer.gateway.errors import GatewayError, payload, status_of
from producer.gateway.generate import CLIENT_GONE, unless_gone
from producer.gateway.services import Services
from producer.gateway.sse import EVENT_STREAM, HEADERS, server_sent
from producer.openai import CHAT_URL, unpack
from ragspec.asking.events import Delta, Finished
from ragspec.errors import RagspecError
from ragspec.jobs.answer import Answer
from ragspec.jobs.options import AnswerOptions

router = APIRouter()
#: Our endings in OpenAI's words.
_FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "no_context": "stop"}

_EXAMPLE = {
    "model": "smollm2-135m-instruct:handbook",
    "messages": [{"role": "user", "content": "Who signs a renewal?"}],
}


@router.post(CHAT_URL, summary="Answer the last user message", responses={200: {"content": {EVENT_STREAM: {}}}})
async def complete(
    body: Annotated[dict[str, Any], Body(examples=[_EXAMPLE])],
    request: Request,
    who: Annotated[Caller, Depends(caller)],
) -> Response:
    """Answer the last user message from a collection.

    `model` is `MODEL:COLLECTION`; either may be left out. Other messages are passed over: the prompt is ragspec's own. Passages
    and the acceptance record stand in the field `ragspec`.
    """
    held = who.held
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise GatewayError("stream must be true or false.", code="bad_request", status=422)
    fields = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    question, options = unpack({"url": CHAT_URL, "method": "POST", "body": fields})
    chosen = _options(await _collection(body.get("model"), who), options)
    said = _Said(body.get("model") or held.settings.model)
    patience_s = held.settings.gateway_timeout
    if not question.strip():
        raise GatewayError("The last user message is blank.", code="bad_request", status=422)
    if stream:
        counted = _counted(body.get("stream_options"))
        events = _events(question, chosen, patience_s, held, said, request.url.path, counted=counted)
        return StreamingResponse(events, media_type=EVENT_STREAM, headers=HEADERS)
    answer = await unless_gone(request, held.asker.answer(question, chosen, patience_s))
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    held.metrics.count(answer)
    return JSONResponse(said.whole(answer, own_name(chosen.collection)))


@router.get("/v1/models", summary="The model with each collection")
async def models(who: Annotated[Caller, Depends(caller)]) -> dict[str, Any]:
    """What may stand in `model`."""
    model = who.held.settings.model
    ids = [model, *(f"{model}:{name}" for name in await who.collections())]
    return {
        "object": "list",
        "data": [{"id": one, "object": "model", "created": 0, "owned_by": "ragspec"} for one in ids],
    }


def _counted(options: Any) -> bool:
    """Whether `stream_options` ask for token counts."""
    if options is not None and not isinstance(options, dict):
        raise GatewayError("stream_options must be an object.", code="bad_request", status=422)
    return bool((options or {}).get("include_usage"))


async def _collection(model: Any, who: Caller) -> str:
    """The collection that a `model` names."""
    if model is not None and not isinstance(model, str):
        raise GatewayError("model must be a string.", code="bad_request", status=422)
    name, _, collection = (model or "").partition(":")
    served = who.held.settings.model
    if name not in ("", served):
        raise GatewayError(
            f"The model {name!r} does not exist.", f"This is {served}; GET /v1/models.", code="model_not_found"
        )
    return await who.collection(collection or None)


def _options(collection: str, options: dict[str, Any]) -> AnswerOptions:
    stop = options.get("stop")
    if isinstance(stop, str):
        options = {**options, "stop": [stop]}
    try:
        return AnswerOptions(collection=collection, queue="interactive", **options)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"]))
        message = f"{field}: {fault['msg'].removeprefix('Value error, ')}."
        raise GatewayError(message, code="bad_request", status=400) from None


class _Said:
    """The objects of one completion."""

    def __init__(self, model: str) -> None:
        self._common = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answer: Answer, collection: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": _FINISH[answer.finish_reason], "logprobs": None}
        counts = usage(answer).model_dump()
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [choice],
            "usage": counts,
            "ragspec": extension(answer, collection),
        }

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return server_sent({**self._common, "object": "chat.completion.chunk", "choices": [choice], **more})

    def counts(self, answer: Answer) -> bytes:
        counts = usage(answer).model_dump()
        return server_sent({**self._common, "object": "chat.completion.chunk", "choices": [], "usage": counts})


def extension(answer: Answer, collection: str) -> dict[str, Any]:
    """What OpenAI's form has no place for."""
    return {
        "collection": collection,
        "model": answer.model,
        "finish_reason": answer.finish_reason,
        "passages": answer.passages,
        "acceptance": acceptance(answer).model_dump(),
    }


async def _events(
    question: str,
    options: AnswerOptions,
    patience_s: float,
    held: Services,
    said: _Said,
    path: str,
    *,
    counted: bool,
) -> AsyncIterator[bytes]:
    try:
        yield said.chunk({"role": "assistant", "content": ""})
        async with aclosing(held.asker.events(question, options, patience_s, stream=True)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    yield said.chunk({"content": event.text})
                elif isinstance(event, Finished):
                    answer = event.answer
                    held.metrics.count(answer)
                    extra = extension(answer, own_name(options.collection))
                    yield said.chunk({}, _FINISH[answer.finish_reason], ragspec=extra)
                    if counted:
                        yield said.counts(answer)
        yield server_sent("[DONE]")
    except RagspecError as error:
        yield server_sent(payload(path, status_of(error), error.error_code, error.message, error.advice))
