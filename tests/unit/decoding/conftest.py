"""Tiny models run fastest on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# So that their assertions say what they compared, as those in tests do.
pytest.register_assert_rewrite("tests.unit.decoding.records", "tests.unit.decoding.schedules")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled kernels."""
    return tmp_path_factory.mktemp("kernels")
