"""`python -m worker`: the supervisor of one device."""

from __future__ import annotations

import logging
import sys

import click

from ragspec.errors import RagspecError
from ragspec.settings import load_settings
from worker.supervisor import run

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(message)s")
    try:
        sys.exit(run(load_settings()))
    except RagspecError as error:
        click.echo(f"error[{error.error_code}]: {error}", err=True)
        sys.exit(error.exit_status)
