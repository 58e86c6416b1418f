"""Server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from typing import Any

from fastapi.sse import format_sse_event

EVENT_STREAM = "text/event-stream"
#: nginx would gather events into larger pieces.
HEADERS = {"X-Accel-Buffering": "no"}


def server_sent(data: str | dict[str, Any], event: str | None = None) -> bytes:
    """One event; `data` is JSON, written or not."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return format_sse_event(data_str=text, event=event)
