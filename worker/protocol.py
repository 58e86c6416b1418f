"""What the Celery nodes and the resident process say to each other over a Unix socket.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one map with the key `kind`. Nothing is ever
unpickled, every frame is checked against its dataclass, and whatever does not fit raises `ProtocolError`, on which
either side closes the connection. The resident speaks first, with `Hello`; a client then sends one `Begin` and any
number of `Ask`, or `Ping`. Closing the connection cancels what it asked. This file imports no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from ragspec.jobs.answer import Answer, Question
from ragspec.jobs.options import AnswerOptions

#: Raised by one whenever a frame changes its meaning; both sides must agree.
VERSION = 3
#: Largest frame taken, in bytes: an answer of 32,768 tokens with all its arrays and 100 passages stays below.
MAX_FRAME = 16 * 2**20

_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The other side sent what is no frame of ours."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The resident's first frame: it is ready, and this is what it answers with."""

    model: str
    version: int = VERSION
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True)
class Begin:
    """What holds for every question of a connection.

    Attributes:
        options: the job's options.
        claimed_at: when the shard was claimed, on this machine's monotonic clock, seconds.
        job_id: the questions' job, as text; drafts are copied from its answers. None: they have none.
        stream: whether `Grown` frames tell of each answer while it is written.
    """

    options: AnswerOptions
    claimed_at: float
    job_id: str | None
    stream: bool = False
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True)
class Ask:
    """One question; exactly one `Answered` with its `idx` comes back, in any order."""

    question: Question
    kind: Literal["ask"] = "ask"


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, or the coded reason why there is none."""

    answer: Answer
    kind: Literal["answered"] = "answered"


@dataclass(frozen=True, slots=True)
class Grown:
    """What one or more steps added to an answer, before its `Answered`, where `Begin` asked for it.

    Attributes:
        idx: the question's.
        start: tokens that stand before these.
        tokens: the new ones.
        sources: who proposed each (`ragspec.decoding.acceptance.Source`).
        text: what became certain of the answer's text; all texts together are the answer's.
    """

    idx: int
    start: int
    tokens: list[int]
    sources: list[int]
    text: str
    kind: Literal["grown"] = "grown"


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a `Pong`."""

    kind: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True)
class Pong:
    """How the resident fares.

    Attributes:
        steps: engine steps since it started.
        waiting: questions accepted that the engine does not decode yet.
        running: questions that the engine holds.
        stalled_s: seconds since anything last moved while there was work; 0.0 where there is none.
    """

    steps: int
    waiting: int
    running: int
    stalled_s: float
    kind: Literal["pong"] = "pong"


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on; what this connection has not been answered must be asked again elsewhere."""

    code: str
    message: str
    kind: Literal["failed"] = "failed"


Frame = Hello | Begin | Ask | Answered | Grown | Ping | Pong | Failed

_FRAMES: TypeAdapter[Frame] = TypeAdapter(Annotated[Frame, Field(discriminator="kind")])


def encode(frame: Frame) -> bytes:
    """The bytes of a frame, length included.

    Raises:
        ProtocolError: the frame is larger than `MAX_FRAME`.
    """
    body: bytes = msgpack.packb(_plain(frame))
    if len(body) > MAX_FRAME:
        msg = f"a {frame.kind} frame of {len(body)} bytes is over the limit of {MAX_FRAME}"
        raise ProtocolError(msg)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """The frame whose bytes, without the length, these are.

    Raises:
        ProtocolError: they are none.
    """
    try:
        return _FRAMES.validate_python(msgpack.unpackb(body))
    except (ValueError, msgpack.UnpackException, ValidationError) as error:
        msg = f"not a frame: {type(error).__name__}"
        raise ProtocolError(msg) from error


class FrameBuffer:
    """Cuts a stream of bytes into frames, however it was split on the way."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes; yields every frame that is now complete.

        Raises:
            ProtocolError: a length beyond `MAX_FRAME`, or a body that is no frame.
        """
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME:
                msg = f"a frame of {length} bytes is over the limit of {MAX_FRAME}"
                raise ProtocolError(msg)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield decode(body)


def _plain(frame: Frame) -> dict[str, Any]:
    if isinstance(frame, Begin):  # asdict leaves pydantic models alone
        return {
            "kind": frame.kind,
            "options": frame.options.model_dump(mode="json"),
            "claimed_at": frame.claimed_at,
            "job_id": frame.job_id,
            "stream": frame.stream,
        }
    return asdict(frame)
