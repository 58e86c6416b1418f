"""A head's card: what it is for and what it does. This file imports no torch, so that a wrong head is found out at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragspec.errors import InputError, SettingsError

WEIGHTS, CARD = "head.safetensors", "card.json"
#: What RAGSPEC_HEAD may be besides a folder.
AUTO, NONE = "auto", "none"
#: Heads inside the package, a folder each.
_SHIPPED = Path(__file__).parent / "shipped"
#: Beyond any width, depth or vocabulary.
_MOST = 10_000_000


@dataclass(frozen=True, slots=True)
class HeadCard:
    """What a head is.

    Attributes:
        architecture: its name in the registry.
        target: `name@fingerprint` of the decoder it was trained for.
        vocabulary: of that decoder.
        hidden: width of that decoder's states.
        inner: width of the head's own layer.
        depth: tokens ahead that it was trained for.
        epsilon: of its norms.
        training: data, recipe and version, as they were.
        measured: acceptance on the answers held back.
    """

    architecture: str
    target: str
    vocabulary: int
    hidden: int
    inner: int
    depth: int
    epsilon: float
    training: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)


def read_head_card(folder: Path) -> HeadCard:
    """The card.

    Raises:
        InputError: there is none, or it is none (code `bad_head`).
    """
    try:
        card = HeadCard(**json.loads((folder / CARD).read_text(encoding="utf-8")))
        _check(card)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        msg = f"{folder} holds no speculation head: {error}."
        raise InputError(msg, "Give a folder that `ragspec head train` wrote.", code="bad_head") from error
    return card


def _check(card: HeadCard) -> None:
    counts = {name: getattr(card, name) for name in ("hidden", "inner", "depth", "vocabulary")}
    wrong = [name for name, value in counts.items() if type(value) is not int or not 0 < value <= _MOST]
    wrong += [name for name in ("architecture", "target") if not isinstance(getattr(card, name), str)]
    if not (isinstance(card.epsilon, float) and 0.0 <= card.epsilon < 1.0):
        wrong.append("epsilon")
    if wrong:
        msg = f"its card says {', '.join(f'{name}={getattr(card, name)!r}' for name in wrong)}"
        raise ValueError(msg)


def shipped_heads() -> list[Path]:
    """The folders of the heads inside the package."""
    return sorted(card.parent for card in _SHIPPED.glob(f"*/{CARD}"))


def chosen_head(name: str) -> tuple[Path, HeadCard] | None:
    """The head in the folder that RAGSPEC_HEAD names; None where it is `auto` or `none`.

    Raises:
        SettingsError: the folder holds no head; the message says why.
    """
    if name in {AUTO, NONE}:
        return None
    folder = Path(name).expanduser()
    try:
        card = read_head_card(folder)
    except InputError as error:
        raise bad_setting(name, error.message) from error
    if not (folder / WEIGHTS).is_file():
        raise bad_setting(name, f"{folder} holds no {WEIGHTS}.")
    return folder, card


def bad_setting(name: str, reason: str) -> SettingsError:
    """What is wrong with a head, a sentence, as what is wrong with RAGSPEC_HEAD."""
    msg = f"RAGSPEC_HEAD={name}: {reason}"
    return SettingsError(msg, "Give a folder that `ragspec head train` wrote, `auto` or `none`.")
