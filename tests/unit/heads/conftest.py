"""The fixtures of the decoder's tests serve here, too."""

from __future__ import annotations

from tests.unit.decoding.conftest import _one_thread, kernels

__all__ = ["_one_thread", "kernels"]
