"""Whom jobs and collections belong to. This file imports neither torch nor SQLAlchemy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

#: The tenant that owns what was there before there were tenants, and all that the command line submits.
DEFAULT_TENANT = UUID("00000000-0000-0000-0000-000000000001")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of the workers a tenant may take; None: no limit.

    Attributes:
        requests_per_minute: HTTP requests; the gateway counts them.
        max_enqueued_questions: questions of unfinished jobs that are not answered yet.
        max_concurrent_jobs: jobs that are not finished.
    """

    requests_per_minute: int | None = None
    max_enqueued_questions: int | None = None
    max_concurrent_jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant.

    Attributes:
        id: never changes.
        name: for people, unique.
        created_at: when.
        limits: its limits.
    """

    id: UUID
    name: str
    created_at: datetime
    limits: Limits

    def as_json(self) -> dict[str, Any]:
        """As JSON values; the limits stand beside the rest."""
        return {
            "id": str(self.id),
            "name": self.name,
            "created_at": self.created_at.isoformat(),
            **asdict(self.limits),
        }
