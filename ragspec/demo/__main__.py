"""`python -m ragspec.demo`: the main job on real parts, with the same commands a user would type.

It keeps its state in `.ragspec` below the working directory unless RAGSPEC_HOME says otherwise, and leaves the services
running so that the rows can be looked at; the last lines say how to stop them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn
from uuid import UUID

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, select

from ragspec.demo import COLLECTION, questions_file, write_corpus
from ragspec.interpreter import PYTHON
from ragspec.jobs.database import connect
from ragspec.jobs.export import stream_answers
from ragspec.jobs.views import job_acceptance
from ragspec.services.record import is_held
from ragspec.settings import child_environment, load_settings, setting_origins

#: Answers that the demo prints; the rest is a command away.
SHOWN = 12
MAX_TOKENS = 64


def main() -> None:
    """Run the demo."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    home = load_settings().home if setting_origins()["home"] != "default" else Path(".ragspec").absolute()
    _ragspec(home, "models", "fetch")
    if not is_held(home):
        _ragspec(home, "up", "--detach")
    started = time.monotonic()
    corpus = home / "demo" / "python-reference"
    write_corpus(corpus)
    _ragspec(home, "ingest", str(corpus), "--collection", COLLECTION)
    submitted = _ragspec(
        home,
        *("submit", str(questions_file()), "--collection", COLLECTION),
        *("--max-tokens", str(MAX_TOKENS), "--wait", "--json"),
        read=True,
    )
    job_id = UUID(json.loads(submitted)["job_id"])

    engine = connect(load_settings(home=home).require_database())
    console.print(_answers(engine, job_id))
    console.print(_acceptance(engine, job_id))
    _ragspec(home, "evaluate", str(job_id), "--answers", str(questions_file()))
    prefix = f"RAGSPEC_HOME={home} {Path(sys.executable).parent / 'ragspec'}"
    console.print(
        f"\nIngesting, answering and scoring took {time.monotonic() - started:.0f} s. "
        "The services still run, and the rows stay:\n"
        f"  {prefix} show {job_id} py-01\n"
        f"  {prefix} results {job_id} --format csv -o answers.csv\n"
        f"  {prefix} down",
        soft_wrap=True,
    )


def _ragspec(home: Path, *arguments: str, read: bool = False) -> str:
    """Run a `ragspec` command as a user would, and stop where it fails."""
    print(f"\n$ ragspec {' '.join(arguments)}", flush=True)  # noqa: T201 - this program talks to a person
    done = subprocess.run(
        (*PYTHON, "-m", "ragspec", *arguments),
        env=child_environment(home=home),
        stdout=subprocess.PIPE if read else None,
        text=True,
        check=False,
    )
    if done.returncode:
        _give_up(home, done.returncode)
    return done.stdout or ""


def _give_up(home: Path, status: int) -> NoReturn:
    print(f"\nThe demo stops here. Its logs are in {home / 'logs'}.", file=sys.stderr)  # noqa: T201
    sys.exit(status)


def _answers(engine: Engine, job_id: UUID) -> Table:
    table = Table(title="Answers", title_justify="left", show_lines=True)
    table.add_column("id", no_wrap=True)
    for heading in ("question", "answer", "sources"):
        table.add_column(heading, overflow="fold")
    for heading in ("tokens", "tokens/step", "accepted"):
        table.add_column(heading, justify="right")
    for number, (custom_id, question, answer) in enumerate(stream_answers(engine, job_id)):
        if number == SHOWN:
            break
        sources = dict.fromkeys(f"{p['document']} ({p['score']:.2f})" for p in answer.passages)
        table.add_row(
            custom_id,
            question,
            answer.text if answer.status == "completed" else f"failed: {answer.error_code}",
            "\n".join(sources),
            str(answer.completion_tokens),
            f"{answer.mean_acceptance_length:.2f}",
            f"{answer.draft_acceptance_rate:.0%}",
        )
    return table


def _acceptance(engine: Engine, job_id: UUID) -> str:
    with engine.connect() as connection:
        row = connection.execute(select(job_acceptance).where(job_acceptance.c.job_id == job_id)).one()
    proposed = {
        "passages": row.tokens_passage,
        "prompt": row.tokens_prompt,
        "answer": row.tokens_answer,
        "other answers": row.tokens_job,
        "head": row.tokens_head,
    }
    return (
        f"{row.answers} answers, {row.tokens} tokens in {row.steps} verify steps: "
        f"{row.mean_acceptance_length:.2f} tokens/step, {row.draft_acceptance_rate:.0%} of draft tokens accepted. "
        f"Tokens by who proposed them: {', '.join(f'{name} {count}' for name, count in proposed.items())}."
    )


main()
