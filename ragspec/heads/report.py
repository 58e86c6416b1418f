"""A training run as one page: curves of loss and acceptance, and the card. No script, no external asset."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from ragspec.heads.card import read_head_card
from ragspec.heads.training import LOG

_WIDTH, _HEIGHT, _MARGIN = 640, 220, 40


def write_report(folder: Path) -> Path:
    """Write `report.html` beside a head that was trained there; returns its path."""
    lines = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    card = read_head_card(folder)
    losses = [(line["step"], line["loss"]) for line in lines if line["loss"] == line["loss"]]
    epochs = [line for line in lines if line["by_place"]]
    lengths = [(line["step"], line["mean_acceptance_length"]) for line in epochs]
    parts = [
        _figure("Loss", [losses]),
        _figure("Mean acceptance length on answers held back, head alone", [lengths]),
        _figure(
            "Acceptance by place, given that all before stood",
            [[(line["step"], line["by_place"][place]) for line in epochs] for place in range(card.depth)],
        ),
    ]
    facts = html.escape(json.dumps({"training": card.training, "measured": card.measured}, indent=1))
    page = (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(card.architecture)} head</title>"
        "<style>body{font:15px/1.5 system-ui;max-width:44rem;margin:2rem auto;padding:0 1rem}svg{width:100%}</style>"
        f"<h1>{html.escape(card.architecture)} head for {html.escape(card.target)}</h1>{''.join(parts)}<pre>{facts}</pre>\n"
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _figure(title: str, curves: Sequence[Sequence[tuple[float, float]]]) -> str:
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = _MARGIN + (x - left) / ((right - left) or 1) * (_WIDTH - 2 * _MARGIN)
        down = _HEIGHT - _MARGIN - (y - low) / ((high - low) or 1) * (_HEIGHT - 2 * _MARGIN)
        return f"{across:.1f},{down:.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="hsl({number * 70} 60% 40%)" stroke-width="2" '
        f'points="{" ".join(place(x, y) for x, y in curve)}"/>'
        + "".join(f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3"/>' for p in [place(*curve[-1])])
        for number, curve in enumerate(curves)
        if curve
    )
    labels = (
        f'<text x="2" y="{_HEIGHT - _MARGIN}">{low:.3g}</text><text x="2" y="{_MARGIN}">{high:.3g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 12}">step {left:,.0f}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 12}" text-anchor="end">step {right:,.0f}</text>'
    )
    return f'<h2>{html.escape(title)}</h2><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12">{drawn}{labels}</svg>'
