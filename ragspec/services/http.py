"""Asking an HTTP server whether it is there; `python -m ragspec.services.http URL` does so for a container."""

from __future__ import annotations

import sys
import urllib.request


def probe_http(url: str) -> str | None:
    """None if a GET of `url` succeeds, else why not."""
    if not url.startswith(("http://", "https://")):
        return f"{url} is no http:// or https:// address"
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - the scheme was looked at
            return None
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(probe_http(sys.argv[1]))
