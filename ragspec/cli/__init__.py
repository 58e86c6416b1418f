"""The command `ragspec`: thin, one function per verb, and nothing heavy imported before a verb runs."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from ragspec import __version__
from ragspec.errors import RagspecError

#: verb -> (module, attribute, help). The help stands here so that `ragspec --help` imports no verb.
VERBS: dict[str, tuple[str, str, str]] = {
    "up": (
        "ragspec.cli.services",
        "up",
        "Start Redis, PostgreSQL, Chroma, worker, beat, Flower and gateway on this machine.",
    ),
    "down": ("ragspec.cli.services", "down", "Stop what `ragspec up --detach` started."),
    "serve": ("ragspec.cli.serve", "serve", "Answer questions over HTTP."),
    "worker": ("ragspec.cli.services", "worker", "Run one worker: the resident engine and its Celery nodes."),
    "ingest": ("ragspec.cli.corpus", "ingest", "Read documents into a collection."),
    "collections": ("ragspec.cli.corpus", "collections", "List collections, or delete one."),
    "search": ("ragspec.cli.corpus", "search", "Look at what a question retrieves."),
    "submit": ("ragspec.cli.jobs", "submit", "Enqueue a file of questions as a job."),
    "status": ("ragspec.cli.jobs", "status", "Show one job's progress, or every unfinished job's."),
    "jobs": ("ragspec.cli.jobs", "jobs", "List jobs."),
    "results": ("ragspec.cli.results", "results", "Export a job's answers."),
    "show": ("ragspec.cli.results", "show", "Show one answer, its tokens coloured by who proposed them."),
    "evaluate": ("ragspec.cli.results", "evaluate", "Score a job against the answers in its question file."),
    "cancel": ("ragspec.cli.jobs", "cancel", "Cancel a job; answers so far are kept."),
    "retry": ("ragspec.cli.jobs", "retry", "Run a job's failed rows again."),
    "tenants": ("ragspec.cli.tenants", "tenants", "Make, list and limit tenants."),
    "keys": ("ragspec.cli.tenants", "keys", "Make, list and revoke API keys."),
    "head": ("ragspec.cli.head", "head", "Train, measure and look at speculation heads."),
    "models": ("ragspec.cli.models", "models", "Fetch, list and find the models."),
    "config": ("ragspec.cli.config", "config", "Print every setting, its value and where it comes from."),
    "migrate": ("ragspec.cli.services", "migrate", "Bring the database schema up to date."),
}
#: What a warning of a variable that is no setting begins with.
UNKNOWN_SETTING = "warning[unknown_setting]: "


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        module, attribute, _ = VERBS[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, _, text) in VERBS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ragspec")
def cli() -> None:
    """Answer thousands of questions over your own documents, on your own machine.

    \b
    Example:
      ragspec up --detach
      ragspec ingest docs/ --collection handbook
      ragspec submit questions.jsonl --collection handbook --wait
    """
    from ragspec.settings import unknown_settings

    for name, near in unknown_settings().items():
        advice = f"Did you mean {near}?" if near else "`ragspec config` lists every setting."
        click.echo(f"{UNKNOWN_SETTING}There is no setting {name}; it is passed over. {advice}", err=True)


def main() -> None:
    """Run the command line; every error of ours becomes one line on standard error and its exit status."""
    try:
        cli(standalone_mode=True)
    except RagspecError as error:
        click.echo(f"error[{error.error_code}]: {error}", err=True)
        sys.exit(error.exit_status)
