"""Settings: what is allowed, and what is said of the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ragspec.errors import ServiceUnavailableError, SettingsError
from ragspec.services.record import hold_home
from ragspec.settings import PREFIX, SERVICES_FILE, Settings, load_settings, unknown_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but the test's own: an empty working directory and home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGSPEC_HOME", str(tmp_path))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_a_device_that_the_engine_knows_is_taken(device: str) -> None:
    assert load_settings(device=device).device == device


@pytest.mark.parametrize("device", ["mps", "xpu", "cuda:", "cuda:x", "cpu:1", "gpu"])
def test_a_device_that_the_engine_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("RAGSPEC_DEVICE", device)

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert caught.value.message == f"RAGSPEC_DEVICE={device!r}: must be auto, cpu, cuda or cuda:N."


@pytest.mark.parametrize(
    ("below", "above"),
    [
        ("RAGSPEC_HEARTBEAT_INTERVAL=20", "RAGSPEC_STALE_AFTER=20"),
        ("RAGSPEC_CHUNK_OVERLAP=32", "RAGSPEC_CHUNK_TOKENS=16"),
    ],
)
def test_two_settings_that_do_not_fit_are_both_named_and_no_secret_is(
    monkeypatch: pytest.MonkeyPatch, below: str, above: str
) -> None:
    monkeypatch.setenv("RAGSPEC_REDIS_URL", "redis://:hunter2@host/0")
    for assignment in (below, above):
        name, _, value = assignment.partition("=")
        monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert caught.value.message == f"{below} must be below {above}."


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("RAGSPEC_REDIS_URL", "redis://:hunter2@host:notaport/0"),
        ("RAGSPEC_REDIS_URL", "redis://:hunter2@host:99999"),
        ("RAGSPEC_REDIS_URL", "redis://:hunter2@[::1"),
        ("RAGSPEC_REDIS_URL", "redis://:hunter2/5@host"),
        ("RAGSPEC_REDIS_URL", "amqp://:hunter2@host"),
        ("RAGSPEC_CHROMA_URL", "http://me:hunter2@host:notaport"),
        ("RAGSPEC_CHROMA_URL", "host:8000"),
        ("RAGSPEC_REDIS_URL", "redis:hunter2:6379"),
        ("RAGSPEC_REDIS_URL", "redis:/hunter2/0"),
        ("RAGSPEC_CHROMA_URL", "http:/hunter2:8000"),
        ("RAGSPEC_CHROMA_URL", "http://"),
        ("RAGSPEC_CHROMA_URL", "http://:8000"),
    ],
)
def test_an_address_that_is_none_is_refused_by_its_setting_without_its_password(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str
) -> None:
    monkeypatch.setenv(name, address)

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert caught.value.message.startswith(f"{name}=***: must be ")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("address", ["redis://:p%2F@host/0", "rediss://[::1]:6380/1", "redis://host", "redis:///1"])
def test_an_address_that_is_one_is_taken(address: str) -> None:
    assert load_settings(redis_url=address).require_redis() == address


NUMBERS = [name for name, field in Settings.model_fields.items() if field.annotation is float]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    name = PREFIX + field.upper()
    monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert f"{name}={value!r}: " in caught.value.message
    assert "stale_after" in NUMBERS


def test_addresses_of_ragspec_up_count_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / SERVICES_FILE).parent.mkdir()
    (tmp_path / SERVICES_FILE).write_text('{"redis_url": "redis://127.0.0.1:1/0"}')

    with hold_home(tmp_path):
        running = load_settings().require_redis()
    with pytest.raises(ServiceUnavailableError) as killed:
        load_settings().require_redis()
    (tmp_path / SERVICES_FILE).unlink()
    with pytest.raises(ServiceUnavailableError) as stopped:
        load_settings().require_redis()

    assert running == "redis://127.0.0.1:1/0"
    assert f"the `ragspec up` of {tmp_path} is not running any more. Start it again" in str(killed.value)
    assert "neither running here nor configured" in str(stopped.value)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGSPEC_HOME", "")
    monkeypatch.setenv("RAGSPEC_DATABASE_URL", "")

    assert load_settings().home == Path("~/.ragspec").expanduser()
    assert load_settings().database_url is None


def test_a_misspelt_variable_is_named_with_its_nearest_setting_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAGSPEC_MAX_BATHC", "32")
    monkeypatch.setenv("RAGSPEC_MAX_BATCH", "32")
    monkeypatch.setenv("RAGSPEC_TEST_REDIS_URL", "redis://host")
    (tmp_path / ".env").write_text("ragspec_modle=mine\nRAGSPEC_ZZZ=1\nOTHER=2\n")

    assert unknown_settings() == {
        "RAGSPEC_MAX_BATHC": "RAGSPEC_MAX_BATCH",
        "RAGSPEC_MODLE": "RAGSPEC_MODEL",
        "RAGSPEC_ZZZ": "",
    }


def test_what_kubernetes_sets_for_a_service_called_like_ours_is_no_misspelt_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "RAGSPEC_SERVICE_HOST": "10.0.0.1",
        "RAGSPEC_REDIS_SERVICE_HOST": "10.0.0.1",
        "RAGSPEC_REDIS_SERVICE_PORT": "6379",
        "RAGSPEC_REDIS_SERVICE_PORT_REDIS": "6379",
        "RAGSPEC_REDIS_PORT": "tcp://10.0.0.1:6379",
        "RAGSPEC_REDIS_PORT_6379_TCP": "tcp://10.0.0.1:6379",
        "RAGSPEC_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
        "RAGSPEC_FLOWR_PORT": "5555",
    }.items():
        monkeypatch.setenv(name, value)

    assert unknown_settings() == {"RAGSPEC_FLOWR_PORT": "RAGSPEC_FLOWER_PORT"}


def test_an_env_file_that_cannot_be_read_stops_no_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAGSPEC_MODLE", "mine")
    (tmp_path / ".env").write_bytes(b"\xff\xfe\x00")

    assert unknown_settings() == {"RAGSPEC_MODLE": "RAGSPEC_MODEL"}


@pytest.mark.parametrize("package", ["ragspec", "producer", "worker", "benchmarks"])
def test_code_and_its_messages_name_settings_that_there_are(package: str) -> None:
    """Advice to set what does not exist helps nobody."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {"RAGSPEC_X"}
    named = {
        name
        for file in (ROOT / package).rglob("*.py")
        for name in re.findall(r"\bRAGSPEC_[A-Z_]+\b", file.read_text(encoding="utf-8"))
    }

    assert named - known == set()
