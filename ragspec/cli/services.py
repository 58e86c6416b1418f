"""`ragspec up`, `down`, `worker` and `migrate`."""

from __future__ import annotations

import sys

import click

from ragspec.cli import UNKNOWN_SETTING
from ragspec.settings import load_settings


@click.command()
@click.option("--detach", is_flag=True, help="Return once everything is well; `ragspec down` stops it.")
@click.option("--no-worker", is_flag=True, help="Only the stores and Flower: no worker, no beat.")
@click.option("--no-flower", is_flag=True, help="No Flower.")
@click.option("--no-gateway", is_flag=True, help="No HTTP gateway.")
def up(*, detach: bool, no_worker: bool, no_flower: bool, no_gateway: bool) -> None:
    """Start Redis, PostgreSQL, Chroma, a worker, beat, Flower and the HTTP gateway on this machine.

    State lies under RAGSPEC_HOME. A store whose URL is configured (RAGSPEC_REDIS_URL, RAGSPEC_DATABASE_URL,
    RAGSPEC_CHROMA_URL) is used and not started. Ctrl-C stops everything; a second Ctrl-C does not wait.

    \b
    Example:
      RAGSPEC_HOME=~/handbook ragspec up --detach
    """
    left_out = {"--no-worker": no_worker, "--no-flower": no_flower, "--no-gateway": no_gateway}
    if detach:
        from ragspec.services.detach import start_detached

        def say(line: str) -> None:
            if not line.startswith(UNKNOWN_SETTING):  # this process has warned of it already
                click.echo(line)

        options = [name for name, given in left_out.items() if given]
        sys.exit(start_detached(load_settings().home, options, say))
    from ragspec.services.supervisor import FRONTS, run_up

    fronts = [front for front in FRONTS if not left_out[f"--no-{front}"]]
    run_up(click.echo, with_worker=not no_worker, fronts=fronts)


@click.command()
def down() -> None:
    """Stop the `ragspec up` of this RAGSPEC_HOME and wait until all of it is gone.

    \b
    Example:
      RAGSPEC_HOME=~/handbook ragspec down
    """
    from ragspec.services.detach import stop_detached

    stop_detached(load_settings().home, click.echo)


@click.command()
@click.option("--check", is_flag=True, help="Run none; succeed if one of this RAGSPEC_HOME is ready on this machine.")
def worker(*, check: bool) -> None:
    """Run one worker: the resident engine and its Celery nodes. Ctrl-C hands back what is unanswered.

    \b
    Example:
      RAGSPEC_DEVICE=cuda:1 ragspec worker
    """
    if check:
        from ragspec.services.worker import require_ready_worker

        require_ready_worker(load_settings().home)
        return
    from worker.supervisor import run

    sys.exit(run(load_settings()))


@click.command()
def migrate() -> None:
    """Bring the database schema up to date. Running it again changes nothing.

    \b
    Example:
      RAGSPEC_DATABASE_URL=postgresql://ragspec@db/ragspec ragspec migrate
    """
    from ragspec.jobs.database import upgrade

    upgrade(load_settings().require_database())
    click.echo("The database schema is up to date.")
