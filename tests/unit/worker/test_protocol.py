"""Frames survive the way whole, and nothing else is taken for one."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import asdict

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.options import AnswerOptions
from worker import protocol
from worker.protocol import (
    Answered,
    Ask,
    Begin,
    Failed,
    Frame,
    FrameBuffer,
    Grown,
    Hello,
    Ping,
    Pong,
    ProtocolError,
    decode,
    encode,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
FINITE = st.floats(allow_nan=False)
COUNTS = st.integers(0, 2**31)
QUESTIONS = st.builds(Question, COUNTS, TEXT, TEXT, st.dictionaries(TEXT, COUNTS | TEXT | st.none(), max_size=3))
ANSWERS = st.builds(
    Answer,
    idx=COUNTS,
    status=st.sampled_from(["completed", "failed"]),
    text=TEXT,
    error_code=st.none() | TEXT,
    queued_ms=FINITE,
    passages=st.lists(st.dictionaries(TEXT, TEXT | FINITE | st.lists(COUNTS, max_size=2), max_size=3), max_size=2),
    token_ids=st.lists(COUNTS, max_size=5),
    token_logprobs=st.lists(FINITE, max_size=5),
)
OPTIONS = st.builds(
    AnswerOptions,
    collection=TEXT,
    top_k=st.integers(0, 100),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    logit_bias=st.dictionaries(COUNTS, st.floats(-100, 100), max_size=3),
)
FRAMES = st.one_of(
    st.builds(Hello, TEXT),
    st.builds(Begin, OPTIONS, FINITE, st.none() | st.text(), st.booleans()),
    st.builds(Ask, QUESTIONS),
    st.builds(Answered, ANSWERS),
    st.builds(Grown, COUNTS, COUNTS, st.lists(COUNTS, max_size=5), st.lists(COUNTS, max_size=5), TEXT),
    st.just(Ping()),
    st.builds(Pong, COUNTS, COUNTS, COUNTS, FINITE),
    st.builds(Failed, TEXT, TEXT),
)


@given(st.lists(FRAMES, max_size=4), st.integers(1, 64))
def test_frames_arrive_as_they_were_sent_however_the_stream_is_cut(frames: list[Frame], piece: int) -> None:
    stream = b"".join(map(encode, frames))
    buffer = FrameBuffer()

    arrived = [frame for at in range(0, len(stream), piece) for frame in buffer.feed(stream[at : at + piece])]

    assert frames == arrived


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        decode(data)
    with suppress(ProtocolError):
        list(FrameBuffer().feed(data))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXT | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
        max_leaves=12,
    ),
    st.sampled_from(["hello", "begin", "ask", "answered", "pong", "failed"]),
)
def test_any_msgpack_value_under_a_known_kind_is_a_frame_or_a_protocol_error(value: object, kind: str) -> None:
    body = {"kind": kind, **(value if isinstance(value, dict) else {"answer": value, "question": value})}
    with suppress(ProtocolError):
        decode(msgpack.packb(body))


def test_a_length_over_the_limit_is_refused_before_its_bytes_are_awaited() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        list(FrameBuffer().feed(struct.pack(">I", protocol.MAX_FRAME + 1)))


def test_a_frame_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="answered frame"):
        encode(Answered(Answer(0, "completed", text="x" * (protocol.MAX_FRAME + 1))))


def test_an_extension_type_is_refused() -> None:
    body = asdict(Failed("code", "message")) | {"message": msgpack.ExtType(5, b"payload")}

    with pytest.raises(ProtocolError):
        decode(msgpack.packb(body))
