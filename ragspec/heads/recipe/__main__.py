"""`python -m ragspec.heads.recipe OUT`: the shipped head from nothing, in six stages that go on where they stopped."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from ragspec.cli.head import Told
from ragspec.errors import RagspecError
from ragspec.heads.recipe.making import HOURS, Making, Options

_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("out", type=_FOLDER)
@click.option(
    "--budget-hours",
    type=click.FloatRange(min=0, min_open=True),
    default=HOURS,
    show_default=True,
    help="How long two cores may take, about; the tokens that are recorded grow with it.",
)
@click.option("--exclude", type=_FILE, multiple=True, help="Train on nothing that shares eight words in a row with it.")
@click.option(
    "--texts", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Use these .txt and .md files."
)
@click.option("--seed", type=int, default=0, show_default=True)
def main(out: Path, budget_hours: float, exclude: tuple[Path, ...], texts: Path | None, seed: int) -> None:
    """Make a speculation head for the target and leave it in OUT/head, with card, curves and figures.

    Texts are fetched by pip and npm, the target answers questions about them and about the built-in topics, a head is
    trained on that, and measured on documents that were held back. Ctrl-C keeps what there is; the same command goes on.
    """
    try:
        making = Making(out, Options(budget_hours, exclude, texts, seed))
        for number, (name, work) in enumerate(making.stages.items(), start=1):
            click.echo(f"{number}/{len(making.stages)} {name}", err=True)
            done_now = making.record.run(name, partial(work, Told()))
            click.echo(f"  {_said(making.record.done[name])}{'' if done_now else '; done before'}", err=True)
    except RagspecError as error:
        click.echo(f"error[{error.error_code}]: {error}", err=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        click.echo(f"\nstopped; the same command goes on in {out}", err=True)
        sys.exit(130)
    click.echo((making.head / "figures.md").read_text(encoding="utf-8"))
    click.echo(f"head, card, curves (report.html) and figures in {making.head}")


def _said(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in given.items() if isinstance(value, int | float))


if __name__ == "__main__":
    main()
