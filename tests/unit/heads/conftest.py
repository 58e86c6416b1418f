"""The fixtures of the decoder's tests serve here, too; answers and a head that are made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.heads.data import write_answers
from ragspec.heads.training import train
from tests import tiny
from tests.unit.decoding.conftest import _one_thread, kernels
from tests.unit.heads.recorded import ANSWERS, RECIPE, WINDOW, requests

__all__ = ["_one_thread", "kernels"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_answers(tiny.smallest(), folder, requests(ANSWERS), source="a test", window=WINDOW)
    return folder


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.smallest(), data, folder, RECIPE)
    return folder
