"""`ragspec config`."""

from __future__ import annotations

import json
from typing import Any

import click
from pydantic import SecretStr

from ragspec.settings import PREFIX, Settings, load_settings, mask_url, setting_origins


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def config(*, as_json: bool) -> None:
    """Print every setting, its value and where it comes from. Secrets are masked.

    \b
    Example:
      RAGSPEC_MAX_BATCH=32 ragspec config
    """
    settings = load_settings()
    origins = setting_origins()
    rows = {
        PREFIX + name.upper(): {
            "value": _shown(getattr(settings, name)),
            "origin": origins[name],
            "description": field.description,
        }
        for name, field in Settings.model_fields.items()
    }
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    width = max(len(name) for name in rows)
    for name, row in rows.items():
        click.echo(f"{name:<{width}}  {row['value']!s:<28}  {row['origin']:<14}  {row['description']}")


def _shown(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return mask_url(value.get_secret_value())
    return value if value is None or isinstance(value, int | float | str) else str(value)
