"""OpenAI Batch lines: `custom_id`, `method`, `url` and a `body` of chat completions or of responses.

The question is the text of the last user message. Other messages are passed over, because the prompt is ragspec's
own; so is `model`, because the worker has one. What would change an answer and cannot be done is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from producer.refusal import NotAskableError

CHAT_URL = "/v1/chat/completions"
RESPONSES_URL = "/v1/responses"
#: Body field -> ours. Later ones win: `max_completion_tokens` is the newer name of `max_tokens`.
_OPTIONS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
_TEXT_PARTS = ("text", "input_text")
#: Body fields that would change the answer, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "instructions": ("",),
}


def is_batch_line(fields: Mapping[str, Any]) -> bool:
    """Whether a row is an OpenAI Batch line rather than a question with an id."""
    return "body" in fields or ("url" in fields and "method" in fields)


def unpack(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The question of a batch line and the options it sets.

    Raises:
        NotAskableError: codes `url_mismatch`, `method_mismatch`, `missing_question`, `unsupported_parameter`,
            `unsupported_content`.
    """
    url, body = fields.get("url"), fields.get("body")
    if url not in (CHAT_URL, RESPONSES_URL):
        raise NotAskableError("url_mismatch", f"url is {_shown(url)}.", f"Only {CHAT_URL} and {RESPONSES_URL} are.")
    if fields.get("method") != "POST":
        raise NotAskableError("method_mismatch", f"method is {_shown(fields.get('method'))}.", "It must be POST.")
    if not isinstance(body, dict):
        raise NotAskableError("missing_question", "body is not an object.")
    for name, harmless in _UNSUPPORTED.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise NotAskableError("unsupported_parameter", f"body.{name} is not supported.", "Leave it out.")
    options = {ours: body[theirs] for theirs, ours in _OPTIONS.items() if body.get(theirs) is not None}
    return _question(body, "messages" if url == CHAT_URL else "input"), options


def _question(body: Mapping[str, Any], field: str) -> str:
    messages = body.get(field)
    if isinstance(messages, str) and field == "input":
        return messages
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            return _text(message.get("content"))
    raise NotAskableError("missing_question", f"body.{field} has no user message.")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise NotAskableError("unsupported_content", "The user message holds more than text.", "Only text is read.")
        texts.append(text)
    return "\n".join(texts)


def _shown(value: Any) -> str:
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."
