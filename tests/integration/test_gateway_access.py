"""Who may ask the gateway, what it sees, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import Engine

from ragspec.corpus.naming import physical_name
from ragspec.corpus.store import open_store
from ragspec.jobs.keys import create_key, revoke_key
from ragspec.jobs.tenant import Limits
from ragspec.jobs.tenants import create_tenant
from ragspec.settings import Settings
from tests.integration.test_gateway import error_of, served
from tests.integration.worker.yard import Yard

pytestmark = pytest.mark.services


@pytest.fixture
def gateway(shared_yard: Yard, chroma_url: str) -> Iterator[httpx.Client]:
    services = {**shared_yard.services, "chroma_url": chroma_url}
    with (
        served(Settings(**services, home=shared_yard.home, gateway_access="keys")) as address,
        httpx.Client(base_url=address, timeout=30) as client,
    ):
        yield client


@pytest.fixture
def acme(engine: Engine) -> str:
    """A key of a tenant that may ask three times a minute."""
    name = f"acme-{uuid4().hex[:8]}"
    create_tenant(engine, name, Limits(requests_per_minute=3))
    return create_key(engine, "laptop", name)[1]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_a_key_nothing_but_health_is_told(gateway: httpx.Client, engine: Engine) -> None:
    for method, path in (
        ("POST", "/generate"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/collections"),
    ):
        body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]} if method == "POST" else None
        for headers, code in (
            ({}, "missing_api_key"),
            ({"Authorization": "Basic eDp5"}, "missing_api_key"),
            ({"Authorization": "Bearer"}, "missing_api_key"),
            (bearer("rsk_" + "x" * 43), "invalid_api_key"),
            (bearer("none"), "invalid_api_key"),
        ):
            content = {"json": {"prompt": "x"} if path == "/generate" else body} if body else {}
            assert error_of(gateway.request(method, path, headers=headers, **content)) == (401, code)
    assert gateway.get("/healthz").status_code == 200
    assert gateway.get("/metrics").status_code == 200


def test_a_revoked_key_is_let_in_no_more(gateway: httpx.Client, engine: Engine) -> None:
    kept, key = create_key(engine, f"phone {uuid4()}")
    assert gateway.get("/collections", headers=bearer(key)).status_code == 200
    revoke_key(engine, str(kept.id))
    assert error_of(gateway.get("/collections", headers=bearer(key))) == (401, "invalid_api_key")


def test_a_tenant_sees_its_own_collections_by_its_own_names(
    gateway: httpx.Client, engine: Engine, shared_yard: Yard, chroma_url: str
) -> None:
    tenant = create_tenant(engine, f"globex-{uuid4().hex[:8]}")
    _, key = create_key(engine, "laptop", tenant.name)
    with open_store(Settings(chroma_url=chroma_url, home=shared_yard.home)) as store:
        for name in (physical_name(tenant.id, "handbook"), f"public-{tenant.name}"):
            store.create(name, "embedder@0", 3)

    assert gateway.get("/collections", headers=bearer(key)).json() == {"collections": ["handbook"]}
    models = [model["id"] for model in gateway.get("/v1/models", headers=bearer(key)).json()["data"]]
    assert models == ["smollm2-135m-instruct", "smollm2-135m-instruct:handbook"]
    spied = gateway.post("/generate", headers=bearer(key), json={"prompt": "x", "collection": "no..name"})
    assert error_of(spied) == (422, "bad_collection_name")


def test_requests_are_counted_and_what_is_left_is_told(
    gateway: httpx.Client, acme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.gateway.access._now", lambda: 1_000_000_030.0)  # no minute turns in between
    found = [gateway.get("/v1/models", headers=bearer(acme)) for _ in range(5)]

    assert [response.status_code for response in found] == [200, 200, 200, 429, 429]
    assert [response.headers["x-ratelimit-remaining-requests"] for response in found] == ["2", "1", "0", "0", "0"]
    assert {response.headers["x-ratelimit-limit-requests"] for response in found} == {"3"}
    assert found[-1].headers["retry-after"] == found[-1].headers["x-ratelimit-reset-requests"].removesuffix("s") == "51"
    assert found[-1].json()["error"]["code"] == "rate_limited"


def test_an_open_gateway_takes_any_word_for_a_key_but_no_false_key(
    shared_yard: Yard, chroma_url: str, engine: Engine
) -> None:
    settings = Settings(**{**shared_yard.services, "chroma_url": chroma_url}, home=shared_yard.home)
    with served(settings) as address, httpx.Client(base_url=address, timeout=30) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models", headers=bearer("unused")).status_code == 200
        assert client.get("/v1/models", headers=bearer("rsk_" + "x" * 43)).status_code == 401
