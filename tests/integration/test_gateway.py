"""The HTTP gateway as clients see it: real Redis, real Celery, a real worker whose model is a stand-in."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
import uvicorn

from producer.gateway.app import MAX_BODY, make_app
from ragspec.queue import ASKS, waiting
from ragspec.settings import Settings
from tests.integration.worker.yard import Worker, Yard, engine_is_idle
from tests.worker_stand_in import MODEL

pytestmark = pytest.mark.services


@contextmanager
def served(settings: Settings) -> Iterator[str]:
    """A gateway in a thread of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(settings), log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the gateway ended"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def gateway(steady_yard: Yard) -> Iterator[httpx.Client]:
    yard = steady_yard
    settings = Settings(**yard.services, home=yard.home, gateway_collection="handbook", gateway_timeout=20)
    with served(settings) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield client


@pytest.fixture
def worker(steady_yard: Yard) -> Worker:
    return steady_yard.a_worker()


def events(response: httpx.Response) -> list[tuple[str, dict]]:
    """Name and data of each server-sent event; those without a name are called `message`."""
    found, name = [], "message"
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append((name, json.loads(data) if data != "[DONE]" else {"done": True}))
            name = "message"
    return found


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_question_is_answered_and_everything_about_it_is_told(gateway: httpx.Client, worker: Worker) -> None:
    answer = gateway.post("/generate", json={"prompt": "why is the sky blue?"}).json()

    assert answer["answer"] == "?eulb yks eht si yhw"
    assert (answer["finish_reason"], answer["model"], answer["collection"]) == ("stop", MODEL, "handbook")
    assert answer["passages"][0] | {"score": 0.9} == answer["passages"][0]
    parts = answer["latency_ms"]
    assert parts["total"] > parts["prefill"] + parts["decode"] > 0
    assert answer["tokens_per_second"] == pytest.approx(2 / 0.003, rel=0.01)
    assert answer["usage"] == {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23}
    assert answer["acceptance"]["token_sources"] == ["target", "passage", "target"]
    assert answer["acceptance"]["mean_acceptance_length"] == 2.0

    page = gateway.get("/metrics").text
    assert 'rag_spec_request_latency_seconds_count{route="/generate",status="200"} 1.0' in page
    assert 'rag_spec_spec_decode_num_accepted_tokens_total{source="passage"} 1.0' in page
    assert 'rag_spec_generation_tokens_total{source="target"} 2.0' in page


def test_tokens_come_as_they_are_verified(gateway: httpx.Client, worker: Worker) -> None:
    with gateway.stream("POST", "/generate", json={"prompt": "tell me more", "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *tokens, (last, whole) = events(response)

    assert {name for name, _ in tokens} == {"token"}
    assert len(tokens) > 1
    assert "".join(data["text"] for _, data in tokens) == whole["answer"] == "erom em llet"
    assert last == "done"


def test_the_openai_client_completes_and_streams(gateway: httpx.Client, worker: Worker) -> None:
    client = openai.OpenAI(base_url=f"{gateway.base_url}/v1", api_key="unused", max_retries=0)
    asked = {
        "model": "smollm2-135m-instruct:handbook",
        "messages": [{"role": "user", "content": "who signs a renewal?"}],
    }
    whole = client.chat.completions.create(**asked, max_tokens=20, stop="\n\n")
    assert whole.choices[0].message.content == "?lawener a sngis ohw"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == 23
    assert whole.model_extra is not None
    assert whole.model_extra["ragspec"]["passages"][0]["document"] == "sky.md"

    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "?lawener a sngis ohw"
    assert chunks[-1].usage is not None
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"

    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-4o", messages=asked["messages"])
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(**asked, tools=[{"type": "function", "function": {"name": "f"}}])


def test_a_deadline_is_kept_and_the_engine_let_go(gateway: httpx.Client, worker: Worker, steady_yard: Yard) -> None:
    steady_yard.behave(step_s=1.0)

    late = gateway.post("/generate", json={"prompt": "a long one", "timeout": 1.5})
    assert error_of(late) == (504, "deadline_exceeded")
    with gateway.stream("POST", "/generate", json={"prompt": "again", "timeout": 1.5, "stream": True}) as response:
        name, data = events(response)[-1]
    assert (name, data["error"]["code"]) == ("error", "deadline_exceeded")
    steady_yard.until(lambda: engine_is_idle(worker), 10)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_its_question(
    gateway: httpx.Client, worker: Worker, steady_yard: Yard, stream: bool
) -> None:
    steady_yard.behave(step_s=1.0)
    body = {"prompt": "a long one", "stream": stream}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=gateway.base_url, timeout=0.8) as hasty:
        hasty.post("/generate", json=body)

    steady_yard.until(lambda: engine_is_idle(worker), 10)
    steady_yard.until(lambda: gateway.get("/readyz").json().get("waiting") == 0, 10)


def test_without_a_worker_the_deadline_says_so_and_nothing_is_left(gateway: httpx.Client, steady_yard: Yard) -> None:
    yard = steady_yard
    yard.a_worker().stop()
    yard.until(lambda: gateway.get("/readyz").status_code == 503, 15)
    assert gateway.get("/healthz").json() == {"status": "alive"}

    assert error_of(gateway.post("/generate", json={"prompt": "anyone?", "timeout": 0.5})) == (504, "deadline_exceeded")
    worker = yard.a_worker()
    yard.until(lambda: gateway.get("/readyz").status_code == 200, 15)
    yard.until(lambda: waiting(yard.app)[ASKS] == 0, 10)
    assert engine_is_idle(worker)


BAD = {
    "no JSON": (b"{", 400, "bad_json"),
    "no object": (b"[]", 422, "bad_request"),
    "no prompt": (b"{}", 422, "bad_request"),
    "a blank prompt": (b'{"prompt": "  "}', 422, "bad_request"),
    "a strange field": (b'{"prompt": "x", "promt": 1}', 422, "bad_request"),
    "a wrong number": (b'{"prompt": "x", "top_p": 0}', 422, "bad_request"),
    "a wrong pair": (b'{"prompt": "x", "max_tokens": 2, "min_tokens": 3}', 422, "bad_request"),
    "not a number": (b'{"prompt": "x", "timeout": NaN}', 422, "bad_request"),
    "a broken character": (b'{"prompt": "\xff"}', 400, "bad_json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_bodies_are_refused_by_name(gateway: httpx.Client, case: str) -> None:
    body, status, code = BAD[case]

    json_type = {"Content-Type": "application/json"}
    assert error_of(gateway.post("/generate", content=body, headers=json_type)) == (status, code)

    def in_pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    assert error_of(gateway.post("/generate", content=in_pieces(), headers=json_type)) == (status, code)


def test_a_body_that_is_too_large_is_not_read_to_its_end(gateway: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * MAX_BODY + b'"}'
    json_type = {"Content-Type": "application/json"}

    declared = gateway.post("/generate", content=body, headers=json_type)
    in_pieces = gateway.post(
        "/generate", content=(body[i : i + 999] for i in range(0, len(body), 999)), headers=json_type
    )

    assert declared.status_code == in_pieces.status_code == 413
    assert gateway.get("/healthz").status_code == 200


def test_a_body_that_is_not_declared_as_json_is_not_read(gateway: httpx.Client) -> None:
    """A page of another site can send such a body without asking the browser's leave."""
    for headers in ({}, {"Content-Type": "text/plain"}):
        response = gateway.post("/generate", content=b'{"prompt": "x"}', headers=headers)
        assert error_of(response) == (415, "bad_content_type")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "x"},
        {"messages": [{"role": "user", "content": " "}]},
        {"messages": [{"role": "user", "content": "x"}], "stream": "yes"},
        {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"},
        {"messages": [{"role": "user", "content": "x"}], "model": 5},
        {"messages": [{"role": "user", "content": "x"}], "stream_options": 5, "stream": True},
    ],
)
def test_bad_completions_are_refused_in_openais_form(gateway: httpx.Client, body: dict) -> None:
    response = gateway.post("/v1/chat/completions", json=body)

    assert 400 <= response.status_code < 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_question_that_fails_says_why(gateway: httpx.Client, worker: Worker) -> None:
    assert error_of(gateway.post("/generate", json={"prompt": "!add"})) == (422, "prompt_too_long")
    assert error_of(gateway.post("/generate", json={"prompt": "!prompt"})) == (500, "internal_error")
    assert error_of(gateway.get("/nowhere")) == (404, "not_found")
    assert error_of(gateway.get("/generate")) == (405, "method_not_allowed")
