"""`ragspec serve`."""

from __future__ import annotations

import click

from ragspec.errors import SettingsError
from ragspec.settings import load_settings

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port. [default: RAGSPEC_GATEWAY_PORT]")
def serve(host: str, port: int | None) -> None:
    """Answer questions over HTTP: /generate, OpenAI's /v1/chat/completions, /metrics; /docs describes them.

    Workers answer (`ragspec up` or `ragspec worker`). With RAGSPEC_GATEWAY_ACCESS=open, the default, whoever reaches the
    address may ask, so it must be this machine's own; with `keys` an API key is asked for (`ragspec keys`). Ctrl-C ends it.

    \b
    Example:
      ragspec serve --port 8080
      curl -X POST localhost:8080/generate -H 'Content-Type: application/json' -d '{"prompt": "Who signs a renewal?"}'
    """
    import uvicorn

    from producer.gateway.app import make_app

    settings = load_settings()
    settings.require_redis()
    if settings.gateway_access == "open" and host not in _LOOPBACK:
        raise SettingsError(
            f"RAGSPEC_GATEWAY_ACCESS=open would let in whoever reaches {host}.",
            "Set it to `keys`, or listen on 127.0.0.1 behind something that knows its users.",
        )
    if settings.gateway_access == "keys":
        settings.require_database()
    chosen = settings.gateway_port if port is None else port
    uvicorn.run(
        make_app(settings), host=host, port=chosen, log_level="info", access_log=False, timeout_graceful_shutdown=5
    )
