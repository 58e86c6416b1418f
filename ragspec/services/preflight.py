"""What is known to be wrong before anything is started. Found late, it would come wrapped in the death of a process."""

from __future__ import annotations

from ragspec.heads.card import chosen_head
from ragspec.settings import Settings


def check_stores(settings: Settings) -> None:
    """See that a configured database has an address that can be one.

    Raises:
        SettingsError: RAGSPEC_DATABASE_URL is none.
    """
    from ragspec.jobs.database import psycopg_url

    if settings.database_url is not None:
        psycopg_url(settings.database_url.get_secret_value())


def check_worker(settings: Settings) -> None:
    """See that what a worker needs can be right, as far as that is told without a model and a service.

    Raises:
        SettingsError: RAGSPEC_DATABASE_URL is no address of a database, or RAGSPEC_HEAD names a folder without a head.
    """
    check_stores(settings)
    if settings.max_draft:  # else no head is loaded
        chosen_head(settings.head)
