"""Writes the reference pages that come out of the code: `make docs`, or `python docs/generate.py`.

docs/reference/settings.md out of `ragspec.settings.Settings`, docs/reference/cli.md out of the help of every verb. A test
holds both files against what this gives, so they cannot lag behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ragspec.cli import cli
from ragspec.settings import PREFIX, Settings

REFERENCE = Path(__file__).parent / "reference"
#: Columns of a help text, whatever terminal this runs in.
HELP_WIDTH = 100

SETTINGS_PAGE = """\
# Settings

Generated from `ragspec.settings.Settings` by `make docs`; do not edit.

Every setting is an environment variable, and nothing else in the project reads the environment. Where a value comes from,
highest first: the environment, the file `.env` in the working directory, the addresses of a running `ragspec up`
(`RAGSPEC_HOME/run/services.json`), the default. `ragspec config` prints each value and its origin, secrets masked; a wrong
value ends a command with `bad_setting`, the variable's name and what is allowed, and exit status 78.

A variable that begins with `RAGSPEC_` and is no setting, perhaps misspelt, is passed over; the command line warns of it on
standard error and names the nearest one. What Kubernetes sets for a service whose name begins with `ragspec` brings no warning.

A worker reads its settings when it starts. Unset is written `-`.

| Variable | Default | Allowed | Meaning |
| --- | --- | --- | --- |
{rows}
"""
CLI_PAGE = """\
# Command line

Generated from the help of every verb by `make docs`; do not edit. Exit statuses and error codes: [exit codes](exit-codes.md).

```text
{help}
```
{verbs}"""
VERB = """
## {path}

```text
{help}
```
"""


def pages() -> dict[Path, str]:
    """Every generated page and what it has to hold."""
    return {REFERENCE / "settings.md": settings_page(), REFERENCE / "cli.md": cli_page()}


def settings_page() -> str:
    """One row a setting, in the order of the source."""
    fields = Settings.model_json_schema()["properties"]
    rows = (
        f"| `{PREFIX}{name.upper()}` | {_default(field)} | {_allowed(field)} | {field['description']} |"
        for name, field in fields.items()
    )
    return SETTINGS_PAGE.format(rows="\n".join(rows))


def cli_page() -> str:
    """The help of the group, then of every verb."""
    root = _context(cli, "ragspec", None)
    verbs = (VERB.format(path=context.command_path, help=context.get_help()) for context in _verbs(root))
    return CLI_PAGE.format(help=root.get_help(), verbs="".join(verbs))


def _verbs(parent: click.Context) -> Iterator[click.Context]:
    if not isinstance(parent.command, click.Group):
        return
    for name in parent.command.list_commands(parent):
        command = parent.command.get_command(parent, name)
        if command is not None:
            context = _context(command, name, parent)
            yield context
            yield from _verbs(context)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(command, parent, name, terminal_width=HELP_WIDTH, **command.context_settings)


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    return "-" if default is None else f"`{default}`"


def _allowed(field: dict[str, Any]) -> str:
    # An optional setting is `anyOf` its type and null.
    field = field | next((kind for kind in field.get("anyOf", ()) if kind["type"] != "null"), {})
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if field["type"] == "string":
        return "path" if field.get("format") == "path" else "secret" if field.get("writeOnly") else "text"
    kind = {"integer": "whole number", "number": "number"}[field["type"]]
    if "maximum" in field:
        return f"{kind}, {field['minimum']} to {field['maximum']}"
    limits = {"minimum": "at least", "exclusiveMinimum": "above"}
    return ", ".join([kind, *(f"{words} {field[key]:g}" for key, words in limits.items() if key in field)])


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
