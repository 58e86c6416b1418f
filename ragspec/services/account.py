"""The account that PostgreSQL runs under where we are root: it refuses to serve as root."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ragspec.errors import ServiceUnavailableError

#: Taken in this order where they exist; the last one is made where none does.
NAMES = ("postgres", "ragspec")


@dataclass(frozen=True, slots=True)
class Account:
    """A system account; ids as in the password database."""

    name: str
    uid: int
    gid: int


def unprivileged_account() -> Account | None:
    """The account to run under in place of root; None where we are not root.

    Raises:
        ServiceUnavailableError: there is none, and none could be made.
    """
    if os.geteuid() != 0:
        return None
    for name in NAMES:
        if account := _look_up(name):
            return account
    command = ("useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", NAMES[-1])
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise ServiceUnavailableError(
            f"PostgreSQL refuses to run as root, and the account {NAMES[-1]!r} could not be made: {reason.strip()}",
            f"Make a system account named {NAMES[-1]!r}, run ragspec as an ordinary user, or set RAGSPEC_DATABASE_URL.",
        ) from None
    account = _look_up(NAMES[-1])
    if account is None:  # pragma: no cover - useradd succeeded, so only a broken password database ends here
        raise ServiceUnavailableError(f"The account {NAMES[-1]!r} was made but is not found.")
    return account


def reaches(account: Account, path: Path) -> bool:
    """Whether `account` may enter the folder (or run the program) `path`, every folder above it included."""
    # Asked of the kernel, not read off mode bits, so that ACLs and mounts count.
    asked = subprocess.run(
        ("test", "-x", str(path)),
        check=False,
        cwd="/",
        user=account.uid,
        group=account.gid,
        extra_groups=[],
    )
    return asked.returncode == 0


def _look_up(name: str) -> Account | None:
    import pwd

    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
