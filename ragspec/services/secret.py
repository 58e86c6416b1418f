"""Files that hold what lets one in."""

from __future__ import annotations

import os
from pathlib import Path


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner reads, from its first byte on; it appears whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)
