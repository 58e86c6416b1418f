"""Options are refused where they enter, before a worker meets them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ragspec.jobs.options import RowOptions


@pytest.mark.parametrize("penalty", [10**20, 1e300, 0, -1, 1e-300, float("nan"), float("inf")])
def test_a_repetition_penalty_that_means_nothing_is_refused(penalty: float) -> None:
    """JSON holds numbers of any size, and PostgreSQL gives 1e20 back as an integer that no message can carry."""
    with pytest.raises(ValidationError, match="repetition_penalty"):
        RowOptions(repetition_penalty=penalty)
