"""What was measured, as rows, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers.peer import OURS
from benchmarks.peers.protocol import Answers
from benchmarks.peers.rounds import Measured

_HEADINGS = (
    "peer",
    "questions/s",
    "slowest to fastest run",
    "output tokens",
    "tokens/s",
    "ragspec is",
    "prompt tokens from cache",
    "same answers as ragspec",
    "weights",
    "versions",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A peer's line; None where there is nothing to say.

    Attributes:
        peer: its name.
        runs: finished runs that the medians are over.
        questions_per_s: by the median run.
        slowest, fastest: questions per second of the slowest and of the fastest run.
        output_tokens: of a run, median, end tokens not counted.
        tokens_per_s: output tokens per second of the median run.
        ratio: ragspec's questions per second over this peer's.
        cached: share of all prompt tokens that came out of its prefix cache, by its own count, in the last run.
        agreement: share of answers that equal ragspec's token for token, last run against last run.
        weights, versions: as it says itself.
        failure: why it has no figures, or no more runs.
    """

    peer: str
    runs: int
    questions_per_s: float | None = None
    slowest: float | None = None
    fastest: float | None = None
    output_tokens: float | None = None
    tokens_per_s: float | None = None
    ratio: float | None = None
    cached: float | None = None
    agreement: float | None = None
    weights: str = ""
    versions: str = ""
    failure: str = ""


def rows_of(measured: Sequence[Measured], prompt_tokens: int) -> list[Row]:
    """One row a peer, in the given order."""
    ours = next((one for one in measured if one.peer.name == OURS and one.runs), None)
    return [_row(one, ours, prompt_tokens) for one in measured]


def as_markdown(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """A page for benchmarks/results: what was run, and the table."""
    lines = [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", _line(_HEADINGS), _line("---" for _ in _HEADINGS)]
    lines += [_line(_cells(row)) for row in rows]
    return "\n".join(lines) + "\n"


def as_json(about: dict[str, Any], rows: Sequence[Row], measured: Sequence[Measured]) -> str:
    """The same with the seconds of every run."""
    seconds = {one.peer.name: [round(run.seconds, 3) for run in one.runs] for one in measured}
    return json.dumps({"about": about, "rows": [asdict(row) for row in rows], "seconds": seconds}, indent=2) + "\n"


def _row(one: Measured, ours: Measured | None, prompt_tokens: int) -> Row:
    versions = ", ".join(f"{name} {version}" for name, version in one.ready.versions.items()) if one.ready else ""
    weights = one.ready.weights if one.ready else ""
    if not one.runs:
        return Row(one.peer.name, 0, weights=weights, versions=versions, failure=one.failure)
    last = one.runs[-1]
    questions = len(last.outputs)
    return Row(
        peer=one.peer.name,
        runs=len(one.runs),
        questions_per_s=questions / one.seconds,
        slowest=questions / max(run.seconds for run in one.runs),
        fastest=questions / min(run.seconds for run in one.runs),
        output_tokens=one.output_tokens,
        tokens_per_s=one.output_tokens / one.seconds,
        ratio=one.seconds / ours.seconds if ours else None,
        cached=None if last.cached_tokens is None else last.cached_tokens / prompt_tokens,
        agreement=_agreement(last, ours.runs[-1]) if ours else None,
        weights=weights,
        versions=versions,
        failure=one.failure,
    )


def _agreement(theirs: Answers, ours: Answers) -> float:
    return sum(a == b for a, b in zip(theirs.outputs, ours.outputs, strict=True)) / len(ours.outputs)


def _cells(row: Row) -> list[str]:
    if row.questions_per_s is None:
        return [row.peer, f"failed: {row.failure}", *[""] * (len(_HEADINGS) - 4), row.weights, row.versions]
    name = f"{row.peer} (then failed: {row.failure})" if row.failure else row.peer
    return [
        name,
        f"{row.questions_per_s:.3f}",
        f"{row.slowest:.3f} to {row.fastest:.3f}",
        f"{row.output_tokens:.0f}",
        f"{row.tokens_per_s:.1f}",
        "" if row.ratio is None else f"{row.ratio:.2f}x",
        "not told" if row.cached is None else f"{row.cached:.1%}",
        "" if row.agreement is None else f"{row.agreement:.0%}",
        row.weights,
        row.versions,
    ]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
