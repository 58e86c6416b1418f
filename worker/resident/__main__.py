"""`python -m worker.resident --socket PATH --parent PID`; the supervisor starts it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import click

from ragspec.errors import RagspecError
from ragspec.settings import Settings, load_settings
from worker.lifeline import die_with
from worker.resident.parts import Parts
from worker.resident.process import load_parts, serve


def command(load: Callable[[Settings], Parts]) -> click.Command:
    """The command line of a resident process that loads its parts with `load`."""

    @click.command()
    @click.option("--socket", type=click.Path(path_type=Path), required=True, help="Where to listen.")
    @click.option("--parent", type=int, required=True, help="The process to end with.")
    def resident(socket: Path, parent: int) -> None:
        die_with(parent)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s resident %(levelname)s %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # or each query of the store is a line
        try:
            status = serve(socket, load_settings(), load)
        except RagspecError as error:
            click.echo(f"error[{error.error_code}]: {error}", err=True)
            status = error.exit_status
        sys.exit(status)

    return resident


if __name__ == "__main__":
    command(load_parts)()
