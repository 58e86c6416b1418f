"""The resident's socket."""

from __future__ import annotations

import socket
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.options import AnswerOptions
from tests.unit.worker.conftest import Serving
from tests.worker_stand_in import MODEL, STEPS, StandInEngine, wait_until
from worker.link import EngineLostError, Link
from worker.protocol import Answered, Ask, Begin, Failed, Frame, Grown, Hello, Ping, Pong, encode

BEGIN = Begin(AnswerOptions(collection="docs"), 0.0, "job-1")


def ask(idx: int, text: str = "why?", row_options: dict[str, object] | None = None) -> Ask:
    return Ask(Question(idx, f"q{idx}", text, row_options or {}))


def read(link: Link, frames: int) -> list[Frame]:
    found: list[Frame] = []
    give_up_at = time.monotonic() + 20
    while len(found) < frames and time.monotonic() < give_up_at:
        found += link.read(1.0)
    return found


def answers(frames: list[Frame]) -> dict[int, Answer]:
    return {frame.answer.idx: frame.answer for frame in frames if isinstance(frame, Answered)}


def test_it_greets_answers_and_tells_how_it_fares(serving: Serving) -> None:
    with Link(serving(StandInEngine()), timeout=5) as link:
        link.send(BEGIN, ask(0, "abc"), ask(1, "def"))
        found = answers(read(link, 2))
        link.send(Ping())
        (pong,) = read(link, 1)

    assert link.model == MODEL
    assert {idx: answer.text for idx, answer in found.items()} == {0: "cba", 1: "fed"}
    assert isinstance(pong, Pong)
    assert (pong.waiting, pong.running, pong.stalled_s) == (0, 0, 0.0)
    assert pong.steps > 0


def test_an_answer_is_told_while_it_grows_to_whom_asked_for_that(serving: Serving) -> None:
    with Link(path := serving(StandInEngine()), timeout=5) as link, Link(path, timeout=5) as other:
        link.send(replace(BEGIN, stream=True), ask(0, "abcdefgh"))
        other.send(BEGIN, ask(0, "ijklmnop"))
        *grown, last = read(link, STEPS + 1)
        assert [type(frame) for frame in read(other, 1)] == [Answered]

    assert isinstance(last, Answered)
    assert "".join(frame.text for frame in grown if isinstance(frame, Grown)) == last.answer.text == "hgfedcba"
    assert len(grown) == STEPS


def test_a_silent_resident_is_no_lost_one(serving: Serving) -> None:
    with Link(serving(StandInEngine()), timeout=5) as link:
        assert [link.read(0), link.read(0.01)] == [[], []]
        link.send(Ping())
        assert isinstance(read(link, 1)[0], Pong)


def test_only_its_owner_may_connect(serving: Serving) -> None:
    assert stat.S_IMODE(serving(StandInEngine()).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(b"\xff\xff\xff\xff", id="huge length"),
        pytest.param(b"\x00\x00\x00\x01\xc1", id="no msgpack"),
        pytest.param(encode(ask(0)), id="question before options"),
        pytest.param(encode(BEGIN) + encode(ask(0)) + encode(ask(0)), id="same question twice"),
        pytest.param(encode(Hello("me")), id="not a client's frame"),
    ],
)
def test_nonsense_closes_its_own_connection_only(serving: Serving, data: bytes) -> None:
    path = serving(StandInEngine(on_step=lambda _: time.sleep(0.01)))
    with socket.socket(socket.AF_UNIX) as bad, Link(path, timeout=5) as good:
        bad.settimeout(10)
        bad.connect(str(path))
        bad.sendall(data)
        while bad.recv(1 << 16):
            pass
        good.send(BEGIN, ask(0, "abc"))

        assert answers(read(good, 1))[0].text == "cba"


def test_a_row_with_wrong_options_fails_alone(serving: Serving) -> None:
    with Link(serving(StandInEngine()), timeout=5) as link:
        link.send(BEGIN, ask(0, row_options={"top_k": -1}), ask(1))
        found = answers(read(link, 2))

    assert (found[0].error_code, found[1].error_code) == ("bad_row_option", None)
    assert "top_k" in (found[0].error_message or "")


def test_hanging_up_cancels(serving: Serving) -> None:
    engine = StandInEngine(on_step=lambda _: time.sleep(0.001), steps=10**9)
    with Link(serving(engine), timeout=5) as link:
        link.send(BEGIN, ask(0), ask(1))
        wait_until(lambda: len(engine.added) == 2)
    wait_until(lambda: len(engine.cancelled) == 2)


def test_a_broken_engine_says_goodbye(serving: Serving) -> None:
    def burst(_: list[str]) -> None:
        raise RuntimeError("device lost")

    with Link(serving(StandInEngine(on_step=burst)), timeout=5) as link:
        link.send(BEGIN, ask(0))
        (farewell,) = read(link, 1)
        with pytest.raises(EngineLostError):
            link.read(5.0)

    assert Failed("engine_failed", "RuntimeError: device lost") == farewell


def test_an_absent_engine_is_an_error_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(EngineLostError, match=r"nowhere\.sock"):
        Link(tmp_path / "nowhere.sock", timeout=1)


def test_a_listener_that_does_not_greet_is_an_error() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"{folder}/mute.sock")
        mute.listen()
        with pytest.raises(EngineLostError):
            Link(Path(folder) / "mute.sock", timeout=0.1)
