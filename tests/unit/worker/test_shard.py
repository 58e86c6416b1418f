"""One run over one shard, against a real server with a stand-in engine; PostgreSQL is stood in for by a list."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from uuid import uuid4

import pytest

from ragspec.errors import ServiceUnavailableError
from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.claims import Claim, ClaimedShard
from ragspec.jobs.options import AnswerOptions
from tests.unit.worker.conftest import Serving
from tests.worker_stand_in import StandInEngine, wait_until
from worker.drain import Drain
from worker.link import Link
from worker.protocol import Hello, encode
from worker.shard import Ending, ShardRun

Life = Literal["ok", "lost", "cancelled"]


@dataclass
class List:
    """A book in memory."""

    questions: int
    life: Callable[[], Life] = lambda: "ok"
    held: bool = True
    away: bool = False
    written: list[Answer] = field(default_factory=list)

    def unanswered(self, claim: Claim, batch: int) -> Iterator[list[Question]]:
        for start in range(0, self.questions, batch):
            yield [Question(i, f"q{i}", f"question {i}") for i in range(start, min(start + batch, self.questions))]

    def record(self, claim: Claim, ready: Sequence[Answer]) -> int:
        if self.away:
            raise ServiceUnavailableError("PostgreSQL does not answer.")
        if not self.held:
            return 0
        self.written += ready
        return len(ready)

    def beat(self, claim: Claim) -> Life:
        return self.life()


@pytest.fixture
def drain() -> Iterator[Drain]:
    made = Drain()
    yield made
    made.close()


def shard_run(link: Link, book: List, drain: Drain, window: int = 8, tries: int = 1) -> ShardRun:
    claim, options = Claim(uuid4(), 0, tries, "here"), AnswerOptions(collection="docs")
    shard = ClaimedShard(claim, options, book.questions, book.questions, tries)
    return ShardRun(shard, link, book, drain, window=window, heartbeat_interval=0.01)


def test_every_question_is_written_once(serving: Serving, drain: Drain) -> None:
    book = List(100)
    with Link(serving(StandInEngine()), timeout=5) as link:
        run = shard_run(link, book, drain)
        ending = run.run()

    assert (ending, run.tally.completed, run.tally.failed) == ("done", 100, 0)
    assert list(range(100)) == sorted(answer.idx for answer in book.written)


def test_what_was_answered_is_written_whatever_goes_wrong_then(serving: Serving, drain: Drain) -> None:
    """The seventeenth question cannot be sent: its options hold a number that no message can."""

    class Unsendable(List):
        def unanswered(self, claim: Claim, batch: int) -> Iterator[list[Question]]:
            yield [Question(i, f"q{i}", f"question {i}") for i in range(16)]
            yield [Question(16, "q16", "question 16", {"repetition_penalty": 10**20})]

    book = Unsendable(17)
    with Link(serving(StandInEngine()), timeout=5) as link, pytest.raises(OverflowError):
        shard_run(link, book, drain, window=4).run()

    assert len(book.written) >= 16 - 4


def test_the_engine_never_holds_more_than_the_window(serving: Serving, drain: Drain) -> None:
    held: list[int] = []
    engine = StandInEngine()
    engine._on_step = lambda _: held.append(len(engine._left))
    with Link(serving(engine), timeout=5) as link:
        shard_run(link, List(40), drain, window=3).run()

    assert max(held) <= 3


@pytest.mark.parametrize("life", ["lost", "cancelled"])
def test_it_stops_when_the_heartbeat_says_so(serving: Serving, drain: Drain, life: Life) -> None:
    opened = threading.Event()
    with Link(serving(StandInEngine(on_step=lambda _: opened.wait(20) and None)), timeout=5) as link:
        ending = shard_run(link, List(100, life=lambda: life), drain).run()
        opened.set()

    assert life == ending


def test_answers_that_nobody_takes_mean_that_the_claim_is_lost(serving: Serving, drain: Drain) -> None:
    with Link(serving(StandInEngine()), timeout=5) as link:
        assert shard_run(link, List(100, held=False), drain).run() == "lost"


def finished_before(book: List, drain: Drain, serving: Serving, event: Callable[[], None]) -> tuple[Ending, int]:
    """Run until five steps' answers are there, then let `event` happen while the engine stands still."""
    opened, steps = threading.Event(), []

    def hold(_: list[str]) -> None:
        steps.append(1)
        if len(steps) > 5:  # the first answers came after the fourth
            opened.wait(20)

    with Link(serving(StandInEngine(on_step=hold)), timeout=5) as link:
        run = shard_run(link, book, drain)
        endings: list[Ending] = []
        thread = threading.Thread(target=lambda: endings.append(run.run()))
        thread.start()
        wait_until(lambda: len(steps) > 5)
        event()
        thread.join(20)
        opened.set()
    return endings[0], run.tally.completed


def test_a_drain_keeps_what_is_answered_and_leaves_the_rest(serving: Serving, drain: Drain) -> None:
    book = List(100)

    ending, completed = finished_before(book, drain, serving, drain.begin)

    assert ending == "drained"
    assert 0 < completed == len(book.written) < 100


def test_an_engine_that_dies_costs_no_answer_that_it_gave(serving: Serving, drain: Drain) -> None:
    def burst(questions: list[str]) -> None:
        if "question 8" in questions:
            raise RuntimeError("device lost")

    book = List(100)
    with Link(serving(StandInEngine(on_step=burst)), timeout=5) as link:
        ending = shard_run(link, book, drain).run()

    assert ending == "engine_lost"
    assert {0, 1, 2, 3} <= {answer.idx for answer in book.written}


def test_after_a_lost_try_a_question_that_kills_the_engine_takes_none_before_it_along(
    serving: Serving, drain: Drain
) -> None:
    def burst(questions: list[str]) -> None:
        if "question 7" in questions:
            raise RuntimeError("device lost")

    book = List(100)
    with Link(serving(StandInEngine(on_step=burst)), timeout=5) as link:
        run = shard_run(link, book, drain, tries=2)
        ending = run.run()

    assert (ending, run.outstanding) == ("engine_lost", 1)
    assert [answer.idx for answer in book.written] == list(range(7))


def test_a_run_whose_engine_dies_before_it_was_asked_anything_has_nothing_outstanding(
    tmp_path: Path, drain: Drain
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        dying = pool.submit(greet_and_die, listener)
        with Link(tmp_path / "s", timeout=5) as link:
            dying.result()
            run = shard_run(link, List(3), drain)
            ending = run.run()

    assert (ending, run.outstanding) == ("engine_lost", 0)


def greet_and_die(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(encode(Hello("model@1")))


def test_a_database_that_stays_away_ends_the_run(serving: Serving, drain: Drain) -> None:
    with Link(serving(StandInEngine()), timeout=5) as link, pytest.raises(ServiceUnavailableError):
        shard_run(link, List(100, away=True), drain).run()
