"""`ragspec tenants` and `ragspec keys`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ragspec.settings import load_settings

if TYPE_CHECKING:
    from ragspec.jobs.limits import Usage
    from ragspec.jobs.tenant import Tenant


NO_LIMIT = "none"
_MOST = 2**31 - 1


#: Field of `ragspec.jobs.tenant.Limits` -> what is said of it. A test holds it against the fields.
LIMITS = {
    "requests_per_minute": "HTTP requests a minute.",
    "max_enqueued_questions": "Questions that wait to be answered.",
    "max_concurrent_jobs": "Jobs that are not finished.",
}


def _limit_options(command: Callable[..., None]) -> Callable[..., None]:
    for limit, text in reversed(LIMITS.items()):
        option = "--" + limit.replace("_", "-")
        help_text = f"{text} `{NO_LIMIT}`: no limit."
        command = click.option(option, metavar=f"NUMBER|{NO_LIMIT}", callback=_limit, help=help_text)(command)
    return command


def _limit(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == NO_LIMIT:
        return value
    if value.isascii() and value.isdecimal() and int(value) <= _MOST:
        return int(value)
    raise click.BadParameter(f"{value!r} is neither a whole number up to {_MOST} nor '{NO_LIMIT}'.", context, parameter)


@click.group()
def tenants() -> None:
    """Make, list and limit tenants: who jobs and collections belong to where several share the workers."""


@tenants.command()
@click.argument("name")
@_limit_options
@click.option("--json", "as_json", is_flag=True, help="Print the tenant as one JSON object.")
def create(*, name: str, as_json: bool, **limits: Any) -> None:
    """Make the tenant NAME.

    \b
    Example:
      ragspec tenants create acme --max-enqueued-questions 100000 --max-concurrent-jobs 10
    """
    from ragspec.cli.database import job_database
    from ragspec.jobs.tenant import Limits
    from ragspec.jobs.tenants import create_tenant

    with job_database(load_settings()) as engine:
        made = create_tenant(engine, name, Limits(**_given(limits)))
    click.echo(json.dumps(made.as_json(), indent=2) if as_json else made.id)


@tenants.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="A JSON list.")
def list_tenants(*, as_json: bool) -> None:
    """List tenants, their limits and what they have under way."""
    from ragspec.cli.database import job_database
    from ragspec.jobs.limits import usage
    from ragspec.jobs.tenants import list_tenants

    with job_database(load_settings()) as engine:
        rows = [(tenant, usage(engine, tenant.id)) for tenant in list_tenants(engine)]
    if as_json:
        click.echo(json.dumps([_as_json(*row) for row in rows], indent=2))
        return
    _print_table(
        ("name", "id", "requests/min", "questions", "jobs"),
        [
            (
                tenant.name,
                str(tenant.id),
                _shown(tenant.limits.requests_per_minute),
                f"{used.enqueued_questions}/{_shown(tenant.limits.max_enqueued_questions)}",
                f"{used.unfinished_jobs}/{_shown(tenant.limits.max_concurrent_jobs)}",
            )
            for tenant, used in rows
        ],
    )


@tenants.command()
@click.argument("name")
@_limit_options
@click.option("--json", "as_json", is_flag=True, help="Print the tenant as one JSON object.")
def limit(*, name: str, as_json: bool, **limits: Any) -> None:
    """Change limits of the tenant NAME; those that are not given stay. What is under way goes on.

    \b
    Example:
      ragspec tenants limit acme --requests-per-minute 600 --max-concurrent-jobs none
    """
    from ragspec.cli.database import job_database
    from ragspec.jobs.tenants import limit_tenant

    changes = _given(limits)
    if not changes:
        raise click.UsageError("No limit is given.")
    with job_database(load_settings()) as engine:
        changed = limit_tenant(engine, name, changes)
    if as_json:
        click.echo(json.dumps(changed.as_json(), indent=2))
        return
    for field in LIMITS:
        click.echo(f"{field.replace('_', ' '):<22}  {_shown(getattr(changed.limits, field))}")


@click.group()
def keys() -> None:
    """Make, list and revoke the API keys with which tenants ask the gateway."""


@keys.command(name="create")
@click.argument("name")
@click.option("--tenant", default="default", show_default=True, help="Whose key.")
@click.option("--json", "as_json", is_flag=True, help="Print the key and what is kept of it as one JSON object.")
def create_key(*, name: str, tenant: str, as_json: bool) -> None:
    """Make the key NAME and print it. It is shown this once: only its SHA-256 is kept.

    \b
    Example:
      ragspec keys create laptop --tenant acme
    """
    from ragspec.cli.database import job_database
    from ragspec.jobs.keys import create_key

    with job_database(load_settings()) as engine:
        kept, key = create_key(engine, name, tenant)
    if as_json:
        click.echo(json.dumps({**kept.as_json(), "key": key}, indent=2))
        return
    click.echo(key)
    click.echo(f"key {kept.id} of tenant {kept.tenant}; keep it, it will not be shown again", err=True)


@keys.command(name="list")
@click.option("--tenant", help="This tenant's only.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list.")
def list_keys(*, tenant: str | None, as_json: bool) -> None:
    """List keys by how they begin, revoked ones too."""
    from ragspec.cli.database import job_database
    from ragspec.jobs.keys import list_keys

    with job_database(load_settings()) as engine:
        found = list_keys(engine, tenant)
    if as_json:
        click.echo(json.dumps([key.as_json() for key in found], indent=2))
    elif not found:
        click.echo("no keys", err=True)
    else:
        _print_table(
            ("id", "tenant", "name", "key", "created", "last used", "revoked"),
            [
                (
                    str(key.id),
                    key.tenant,
                    key.name,
                    key.prefix + "...",
                    *(
                        time.isoformat(sep=" ", timespec="minutes") if time else "-"
                        for time in (key.created_at, key.last_used_at, key.revoked_at)
                    ),
                )
                for key in found
            ],
        )


@keys.command()
@click.argument("key_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print what is kept of the key as one JSON object.")
def revoke(*, key_id: str, as_json: bool) -> None:
    """Let the key ID (or the beginning of one) in no more. Revoking it again changes nothing.

    \b
    Example:
      ragspec keys revoke 3f2a
    """
    from ragspec.cli.database import job_database
    from ragspec.jobs.keys import revoke_key

    with job_database(load_settings()) as engine:
        revoked = revoke_key(engine, key_id)
    click.echo(json.dumps(revoked.as_json(), indent=2) if as_json else f"{revoked.id} revoked")


def _given(limits: dict[str, Any]) -> dict[str, int | None]:
    return {limit: None if value == NO_LIMIT else value for limit, value in limits.items() if value is not None}


def _as_json(tenant: Tenant, used: Usage) -> dict[str, Any]:
    under_way = {"enqueued_questions": used.enqueued_questions, "unfinished_jobs": used.unfinished_jobs}
    return {**tenant.as_json(), **under_way}


def _shown(limit: int | None) -> str:
    return "-" if limit is None else str(limit)


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
