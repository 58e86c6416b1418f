"""The files that deploy ragspec agree with each other and with the settings. No container engine is needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ragspec.services.flower import BUCKETS, COLUMNS
from ragspec.services.worker import STOP_MARGIN
from ragspec.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
EXAMPLE = dict(
    line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if line and not line.startswith("#")
)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_the_compose_file_fits_the_compose_specification() -> None:
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE))

    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [COMPOSE, ROOT / ".env.example", *DOCKERFILES], ids=lambda path: path.name)
def test_every_variable_of_ours_is_a_setting(path: Path) -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}

    assert set(re.findall(r"\bRAGSPEC_[A-Z_]+\b", path.read_text())) - known == set()


def test_the_example_names_what_the_compose_file_reads_with_the_same_defaults() -> None:
    """And leaves blank just what the compose file insists on."""
    text = COMPOSE.read_text()
    optional = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    required = dict.fromkeys(re.findall(r"\$\{(\w+):\?[^}]*\}", text), "")

    assert optional | required == EXAMPLE


def test_every_image_is_pinned_to_a_version(services: dict[str, Any]) -> None:
    images = {service["image"] for service in services.values()}
    for dockerfile in DOCKERFILES:
        images |= set(re.findall(r"^FROM (\S+)", dockerfile.read_text(), flags=re.MULTILINE))

    assert [image for image in images if not re.search(r":\d+\.\d+\.?\d*(-[\w-]+)?$", image)] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_an_ordinary_user_on_pinned_distributions(dockerfile: Path) -> None:
    lines = dockerfile.read_text()

    assert re.findall(r"^USER (\S+)", lines, flags=re.MULTILINE)[-1:] == ["ragspec"]
    installs = re.findall(r"pip install.*", lines)
    assert installs
    assert all("--constraint constraints.txt" in install for install in installs)


def test_every_lasting_service_is_asked_how_it_is_and_started_in_order(services: dict[str, Any]) -> None:
    lasting = {name: service for name, service in services.items() if service.get("restart")}

    assert {name for name, service in lasting.items() if "healthcheck" not in service} == set()
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            expected = "service_healthy" if needed in lasting else "service_completed_successfully"
            assert how == {"condition": expected}, f"{name} on {needed}"


def test_a_stopping_worker_has_time_to_hand_back(services: dict[str, Any]) -> None:
    grace = float(services["worker"]["stop_grace_period"].removesuffix("s"))

    assert grace > float(EXAMPLE["RAGSPEC_SHUTDOWN_TIMEOUT"]) + STOP_MARGIN


def test_the_worker_reserves_a_gpu_and_nothing_else_does(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if "deploy" in service] == ["worker"]
    (device,) = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_queue_keeps_what_it_holds(services: dict[str, Any]) -> None:
    command = services["redis"]["command"][-1]

    assert "appendonly yes" in command
    assert "maxmemory-policy noeviction" in command
    assert "redis:/data" in services["redis"]["volumes"]


def test_flower_shows_the_same_under_compose_as_under_up(services: dict[str, Any]) -> None:
    environment = services["flower"]["environment"]

    assert environment["FLOWER_TASKS_COLUMNS"] == COLUMNS
    assert environment["FLOWER_TASK_RUNTIME_METRIC_BUCKETS"] == BUCKETS
    assert services["flower"]["ports"] == ["127.0.0.1:${RAGSPEC_FLOWER_PORT:-5555}:5555"]


def test_every_requirement_is_pinned_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        Requirement(text)
        for texts in (project["dependencies"], *project["optional-dependencies"].values())
        for text in texts
    ]
    pinned = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    }

    for requirement in wanted:
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0")), requirement
