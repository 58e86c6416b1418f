"""The queries of the documentation run, and docs/reference/tables.md leaves out no column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import Engine, insert, text

from ragspec.jobs import views
from ragspec.jobs.answers import record_answers
from ragspec.jobs.tables import Base, RowError
from tests.integration.jobs.worlds import claim, completed, failed, make_job

pytestmark = pytest.mark.services

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reference" / "tables.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
OTHER_QUERIES = [
    query
    for page in sorted(DOCS.rglob("*.md"))
    for query in re.findall(r"```sql\n(.*?)```", page.read_text(), re.DOTALL)
    if query not in QUERIES
]


def test_every_example_query_runs_and_finds_something(engine: Engine) -> None:
    job_id = make_job(engine)
    record_answers(engine, claim(engine, job_id), [completed(0), failed(1)])
    with engine.begin() as connection:
        connection.execute(insert(RowError).values(job_id=job_id, line=9, code="empty_question", message="Empty."))

        assert len(QUERIES) >= 8
        for query in QUERIES:
            assert connection.execute(text(query)).all(), query


def test_the_queries_of_other_pages_run(engine: Engine) -> None:
    with engine.connect() as connection:
        assert len(OTHER_QUERIES) >= 5
        for query in OTHER_QUERIES:
            connection.execute(text(query)).all()


@pytest.mark.parametrize("table", [*Base.metadata.sorted_tables, views.token_acceptance, views.job_acceptance], ids=str)
def test_every_column_is_explained(table: Base) -> None:
    section = re.search(rf"^## {table}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)

    assert section is not None
    missing = [column.name for column in table.columns if f"`{column.name}`" not in section[1]]
    assert missing == []


def test_the_views_have_the_columns_that_queries_are_written_against(engine: Engine) -> None:
    for view in (views.token_acceptance, views.job_acceptance):
        with engine.connect() as connection:
            found = connection.execute(text(f"SELECT * FROM {view.name} LIMIT 0")).keys()
        assert list(found) == [column.name for column in view.columns]
