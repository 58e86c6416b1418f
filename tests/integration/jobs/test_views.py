"""The views: their parts add up to what the answers say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import Engine, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from ragspec.jobs.answers import record_answers
from ragspec.jobs.tables import AnswerRow, Job, Shard
from ragspec.jobs.views import job_acceptance, token_acceptance
from tests.integration.jobs.worlds import claim, completed, failed, make_job

pytestmark = pytest.mark.services


def test_every_token_has_its_source_and_its_step(engine: Engine) -> None:
    job_id = make_job(engine)
    record_answers(engine, claim(engine, job_id), [completed(0), failed(1)])

    columns = [token_acceptance.c[name] for name in ("position", "token_id", "source", "step", "drafted", "accepted")]
    with engine.connect() as connection:
        query = select(*columns).where(token_acceptance.c.job_id == job_id).order_by(token_acceptance.c.position)
        rows = [tuple(row) for row in connection.execute(query)]

    assert rows == [
        (0, 11, "target", 0, None, None),
        (1, 12, "passage", 1, 3, 2),
        (2, 13, "answer", 1, 3, 2),
        (3, 14, "target", 1, 3, 2),
        (4, 2, "target", 2, 0, 0),
    ]


def test_an_answer_cut_inside_its_last_draft_still_shows_each_token_once(engine: Engine) -> None:
    job_id = make_job(engine)
    whole = completed(0)
    cut = replace(
        whole,
        completion_tokens=3,
        token_ids=[11, 12, 13],
        token_sources=[0, 1, 1],
        token_logprobs=[-1.0, -1.0, -1.0],
        num_verify_steps=1,
        per_step_drafted=[4],
        per_step_accepted=[2],
    )
    record_answers(engine, claim(engine, job_id), [cut])

    with engine.connect() as connection:
        rows = connection.execute(select(token_acceptance.c.position, token_acceptance.c.step)).all()

    assert sorted(tuple(row) for row in rows) == [(0, 0), (1, 1), (2, 1)]


def test_a_job_is_summed_up_over_its_completed_answers(engine: Engine) -> None:
    job_id, empty = make_job(engine), make_job(engine)
    record_answers(engine, claim(engine, job_id), [completed(0), failed(1)])
    record_answers(engine, claim(engine, job_id, 1), [completed(2)])

    with engine.connect() as connection:
        rows = {
            row["job_id"]: dict(row) for row in connection.execute(select("*").select_from(job_acceptance)).mappings()
        }

    assert {name: value for name, value in rows[job_id].items() if name != "job_id"} == {
        "answers": 2,
        "tokens": 10,
        "steps": 4,
        "drafted": 6,
        "accepted": 4,
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": pytest.approx(2 / 3),
        "tokens_target": 6,
        "tokens_passage": 2,
        "tokens_prompt": 0,
        "tokens_answer": 2,
        "tokens_head": 0,
        "tokens_job": 0,
    }
    assert (rows[empty]["answers"], rows[empty]["mean_acceptance_length"]) == (0, 0.0)


@pytest.mark.parametrize(
    ("column", "value"),
    [("completion_tokens", 4), ("num_verify_steps", 3), ("status", "failed"), ("finish_reason", "tired")],
)
def test_the_database_refuses_answers_whose_parts_do_not_add_up(engine: Engine, column: str, value: object) -> None:
    job_id = make_job(engine)
    record_answers(engine, claim(engine, job_id), [completed(0)])

    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(update(AnswerRow).values({column: value}))


def test_the_database_refuses_unknown_states_and_open_shards_that_say_they_are_done(engine: Engine) -> None:
    make_job(engine)

    for statement in (
        update(Job).values(state="sleeping"),
        update(Job).values(state="completed"),
        update(Shard).values(state="done"),
    ):
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(statement)


def test_two_questions_of_a_job_cannot_share_an_id(engine: Engine) -> None:
    from ragspec.jobs.tables import QuestionRow

    job_id = make_job(engine)

    with pytest.raises(IntegrityError, match="uq_questions_job_id_custom_id"), engine.begin() as connection:
        connection.execute(insert(QuestionRow).values(job_id=job_id, idx=99, custom_id="q0", text="again?"))


def test_deleting_a_job_takes_everything_of_it_along(engine: Engine) -> None:
    job_id = make_job(engine)
    record_answers(engine, claim(engine, job_id), [completed(0)])

    with engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs"))
        left = [connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in ("answers", "shards")]

    assert left == [0, 0]
