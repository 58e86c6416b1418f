"""What a collection may be called, and which of Chroma's collections a tenant's name stands for.

The default tenant's names are Chroma's own. Any other tenant's begin there with `tenant-`, its id and `-`, and the default
tenant may give no name that begins so: two tenants' names never meet, whatever they choose. The command line is the
operator's and speaks of Chroma's own names.
"""

from __future__ import annotations

import re
from uuid import UUID

from ragspec.errors import InputError
from ragspec.jobs.tenant import DEFAULT_TENANT

#: Longest name that Chroma takes, in characters.
MAX_CHARS = 512
NAME_RULE = (
    f"A collection's name has 3 to {MAX_CHARS} characters from a-z, A-Z, 0-9, '.', '_' and '-', starts and ends with a "
    "letter or digit, holds no '..' and is no IP address."
)
_NAME = re.compile(rf"[a-zA-Z0-9][a-zA-Z0-9._-]{{1,{MAX_CHARS - 2}}}[a-zA-Z0-9]")
_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}")
_OWNED = re.compile(r"tenant-([0-9a-f]{32})-(.*)", re.DOTALL)


def check_name(name: str) -> None:
    """Refuse a name that Chroma refuses, before anything is sent.

    Raises:
        InputError: code `bad_collection_name`, with the rule.
    """
    if not _NAME.fullmatch(name) or ".." in name or _ADDRESS.fullmatch(name):
        raise InputError(f"{name!r} cannot be a collection's name.", NAME_RULE, code="bad_collection_name")


def physical_name(tenant_id: UUID, name: str) -> str:
    """What Chroma calls a tenant's collection.

    Raises:
        InputError: code `bad_collection_name`: the name breaks the rule, is too long behind the tenant's prefix, or is
            the default tenant's and begins as another's does.
    """
    check_name(name)
    if tenant_id == DEFAULT_TENANT:
        if _OWNED.fullmatch(name):
            raise InputError(
                f"{name!r} begins as the collections of another tenant do.",
                "Choose a name that does not begin with 'tenant-' and an id.",
                code="bad_collection_name",
            )
        return name
    prefix = f"tenant-{tenant_id.hex}-"
    if len(prefix + name) > MAX_CHARS:
        raise InputError(
            f"The collection's name has {len(name)} characters.",
            f"A tenant's may have {MAX_CHARS - len(prefix)}.",
            code="bad_collection_name",
        )
    return prefix + name


def owner_of(physical: str) -> tuple[UUID, str] | None:
    """The inverse: whose a collection of Chroma's is, and what its tenant calls it; None where it can be nobody's."""
    owned = _OWNED.fullmatch(physical)
    tenant_id, name = (UUID(owned[1]), owned[2]) if owned else (DEFAULT_TENANT, physical)
    try:
        return (tenant_id, name) if physical_name(tenant_id, name) == physical else None
    except InputError:
        return None
