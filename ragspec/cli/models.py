"""`ragspec models`."""

from __future__ import annotations

import json
from typing import Any

import click

from ragspec.settings import Settings, load_settings


@click.group()
def models() -> None:
    """Fetch, list and find the models.

    A model is a shipped name, a Hugging Face id or a local folder; RAGSPEC_MODEL and RAGSPEC_EMBEDDER choose them.
    """


@models.command()
@click.argument("names", nargs=-1)
def fetch(names: tuple[str, ...]) -> None:
    """Get models ready on this machine; without NAMES, the target and the embedder of the settings.

    \b
    Example:
      ragspec models fetch
      ragspec models fetch Qwen/Qwen2.5-0.5B-Instruct
    """
    from ragspec.models import ensure_model

    settings = load_settings()
    for name in names or (settings.model, settings.embedder):
        folder = ensure_model(name, settings.models_folder, lambda line: click.echo(line, err=True))
        click.echo(f"{name}  {folder}")


@models.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the folder of a model that is on this machine.

    \b
    Example:
      ls "$(ragspec models path smollm2-135m-instruct)"
    """
    from ragspec.errors import NotFoundError
    from ragspec.models import find_model

    folder = find_model(name, load_settings().models_folder)
    if folder is None:
        raise NotFoundError(f"Model {name!r} is not on this machine.", f"`ragspec models fetch {name}` gets it.")
    click.echo(folder)


@models.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per model.")
def list_models(*, as_json: bool) -> None:
    """List the shipped models and those of the settings: name, kind, size, fingerprint, folder.

    \b
    Example:
      ragspec models list
    """
    settings = load_settings()
    rows = [_row(name, kind, settings) for name, kind in _named(settings).items()]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    width = max(len(str(row["name"])) for row in rows)
    click.echo(f"{'name':<{width}}  {'kind':<8}  {'MB':>7}  {'fingerprint':<16}  folder")
    for row in rows:
        size = f"{row['bytes'] / 1e6:.1f}" if row["bytes"] is not None else "-"
        folder = row["folder"] or "(not here: `ragspec models fetch`)"
        click.echo(f"{row['name']:<{width}}  {row['kind']:<8}  {size:>7}  {row['fingerprint'] or '-':<16}  {folder}")


def _named(settings: Settings) -> dict[str, str]:
    from ragspec.models.shipped import SHIPPED

    shipped = {model.name: str(model.kind) for model in SHIPPED.values()}
    return {**shipped, settings.model: "target", settings.embedder: "embedder"}


def _row(name: str, kind: str, settings: Settings) -> dict[str, Any]:
    from ragspec.models import find_model, fingerprint

    folder = find_model(name, settings.models_folder)
    return {
        "name": name,
        "kind": kind,
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder else None,
        "fingerprint": fingerprint(folder) if folder else None,
        "folder": str(folder) if folder else None,
    }
