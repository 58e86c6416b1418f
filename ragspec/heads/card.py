"""A head's card: what it is for and what it does. This file imports no torch, so that a wrong head is found out at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ragspec.errors import InputError, SettingsError
from ragspec.heads import eagle3
from ragspec.heads.shape import ATTENTION, MOST, AttentionShape, HeadShape

WEIGHTS, CARD = "head.safetensors", "card.json"
#: What RAGSPEC_HEAD may be besides a folder.
AUTO, NONE = "auto", "none"
#: Heads inside the package, a folder each.
_SHIPPED = Path(__file__).parent / "shipped"
_WHICH = "a folder that `ragspec head train` wrote"
_ADVICE = f"Give {_WHICH}, or a published EAGLE-3 head."


@dataclass(frozen=True, slots=True)
class HeadCard:
    """What a head is.

    Attributes:
        architecture: its name in the registry.
        target: `name@fingerprint` of the decoder it was trained for; empty where nobody says.
        vocabulary: of that decoder.
        hidden: width of that decoder's states.
        inner: width of the head's own layer.
        depth: tokens ahead that it was trained for.
        epsilon: of its norms.
        training: data, recipe and version, as they were.
        measured: acceptance on the answers held back.
        attention: the numbers of `AttentionShape`, of a head that attends.
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
    attention: Mapping[str, Any] | None = None

    def shape(self, draft_tokens: tuple[int, ...]) -> HeadShape:
        """The numbers that the head is built by."""
        return HeadShape(self.hidden, self.inner, draft_tokens, self.depth, self.epsilon, self.attention_shape())

    def attention_shape(self) -> AttentionShape | None:
        """Of a head that attends.

        Raises:
            TypeError, ValueError: its numbers are none.
        """
        if self.attention is None:
            return None
        return AttentionShape(**{**self.attention, "layers": tuple(self.attention.get("layers", ()))})


def is_published(folder: Path) -> bool:
    """Whether a folder holds a model of transformers' layout and no head of ours."""
    return (folder / eagle3.CONFIG).exists() and not (folder / CARD).exists()


def weights_file(folder: Path) -> Path:
    """Where a head's weights are."""
    return folder / (eagle3.FILE if is_published(folder) else WEIGHTS)


def read_head_card(folder: Path) -> HeadCard:
    """The card, of a published head what its configuration says.

    Raises:
        InputError: there is none, or it is none, or of a head that we cannot run (code `bad_head`).
    """
    try:
        if is_published(folder):
            card = HeadCard(**eagle3.read_card(folder))
        else:
            card = HeadCard(**json.loads((folder / CARD).read_text(encoding="utf-8")))
        _check(card)
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        msg = f"{folder} holds no speculation head: {error}."
        raise InputError(msg, _ADVICE, code="bad_head") from error
    return card


def _check(card: HeadCard) -> None:
    counts = {name: getattr(card, name) for name in ("hidden", "inner", "depth", "vocabulary")}
    wrong = [name for name, value in counts.items() if type(value) is not int or not 0 < value <= MOST]
    wrong += [name for name in ("architecture", "target") if not isinstance(getattr(card, name), str)]
    if not (isinstance(card.epsilon, float) and 0.0 <= card.epsilon < 1.0):
        wrong.append("epsilon")
    if (card.architecture == ATTENTION) != isinstance(card.attention, Mapping):
        wrong.append("attention")
    if wrong:
        msg = f"its card says {', '.join(f'{name}={getattr(card, name)!r}' for name in wrong)}"
        raise ValueError(msg)
    layer = card.attention_shape()
    if layer is not None and layer.width != card.hidden and not (layer.own_embeddings and layer.own_output):
        msg = f"it is {layer.width} wide and borrows embeddings or output rows of a target {card.hidden} wide"
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
    weights = weights_file(folder)
    if not weights.is_file():
        raise bad_setting(name, f"{folder} holds no {weights.name}.")
    return folder, card


def bad_setting(name: str, reason: str) -> SettingsError:
    """What is wrong with a head, a sentence, as what is wrong with RAGSPEC_HEAD."""
    msg = f"RAGSPEC_HEAD={name}: {reason}"
    return SettingsError(msg, f"Give {_WHICH}, a published EAGLE-3 head, `auto` or `none`.")
