"""PostgreSQL's address, before anything is contacted."""

from __future__ import annotations

import pytest

from ragspec.errors import SettingsError
from ragspec.jobs.database import connect

HOST = "postgresql://me:hunter2@127.0.0.1:1/jobs"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mysql://me:hunter2@host/jobs", "is not a PostgreSQL URL"),
        ("postgresql://me:hunter2@host:notaport/jobs", "is not a PostgreSQL URL"),
        (f"{HOST}?sslmodus=require", 'invalid connection option "sslmodus"'),
        (f"{HOST}?prepare_threshold=5", 'invalid connection option "prepare_threshold"'),
        ("postgresql:///jobs?host=hunter2&host=b&port=x", "hosts and ports behind its `?` do not fit"),
        ("postgresql:///jobs?port=hunter2", "hosts and ports behind its `?` do not fit"),
        ("postgresql:///jobs?host=hunter2:1:2&host=b:1:2", "hosts and ports behind its `?` do not fit"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_at_once_without_its_password(url: str, reason: str) -> None:
    with pytest.raises(SettingsError, match="RAGSPEC_DATABASE_URL") as caught:
        connect(url)

    assert reason in caught.value.message
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("query", ["", "?sslmode=require&target_session_attrs=read-write", "?host=a:1&host=b:2"])
def test_parameters_that_libpq_knows_are_taken(query: str) -> None:
    assert connect(HOST + query).url.database == "jobs"
