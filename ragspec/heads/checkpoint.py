"""A head on disk: weights in safetensors, and a card that says what it is for and what it does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ragspec.decoding.target import Target
from ragspec.errors import InputError
from ragspec.heads.architecture import Head, HeadShape, make_head

WEIGHTS, CARD = "head.safetensors", "card.json"
#: Heads inside the package, a folder each.
_SHIPPED = Path(__file__).parent / "shipped"
_DRAFT_TOKENS = "draft_tokens"
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


def save_head(head: Head, card: HeadCard, folder: Path) -> None:
    """Write both files, each at once."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    tensors[_DRAFT_TOKENS] = torch.tensor(head.shape.draft_tokens, dtype=torch.int32)
    part = folder / f"{WEIGHTS}.part"
    save_file(tensors, part)
    part.replace(folder / WEIGHTS)
    part = folder / f"{CARD}.part"
    part.write_text(json.dumps(asdict(card), indent=1) + "\n", encoding="utf-8")
    part.replace(folder / CARD)


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


def load_head(folder: Path) -> tuple[Head, HeadCard]:
    """Read a head, in float32 on CPU.

    Raises:
        InputError: the files are missing, damaged or of another shape than the card says (code `bad_head`).
    """
    card = read_head_card(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
        tokens = tuple(map(int, tensors.pop(_DRAFT_TOKENS).tolist()))
        head = make_head(card.architecture, HeadShape(card.hidden, card.inner, tokens, card.depth, card.epsilon))
        head.load_state_dict({name: value.float() for name, value in tensors.items()})
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, SafetensorError, InputError) as error:
        msg = f"The head in {folder} cannot be read: {' '.join(str(error).split())}."
        raise InputError(msg, "Train it again, or give another folder.", code="bad_head") from error
    reason = ""
    if not tokens or min(tokens) < 0 or max(tokens) >= card.vocabulary:
        reason = f"drafts tokens outside its vocabulary of {card.vocabulary}"
    elif any(token >= following for token, following in pairwise(tokens)):
        reason = "names its draft tokens twice or out of order"
    elif not all(bool(torch.isfinite(value).all()) for value in head.state_dict().values()):
        reason = "has weights that are no numbers"
    if reason:
        msg = f"The head in {folder} {reason}."
        raise InputError(msg, "Train it again, or give another folder.", code="bad_head")
    return head.requires_grad_(requires_grad=False), card


def head_identity(folder: Path, card: HeadCard) -> str:
    """`architecture@` and the first 16 hex digits of the SHA-256 of its weights."""
    with (folder / WEIGHTS).open("rb") as file:
        return f"{card.architecture}@{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def model_of(identity: str) -> str:
    """`name@fingerprint` of a target's identity: a head serves a model in any precision."""
    name, _, precision = identity.rpartition("+")
    return name or precision


def misfit(card: HeadCard, target: Target) -> str | None:
    """Why a head cannot draft for a target; None where it can."""
    if card.hidden != target.hidden_size:
        return f"its states are {card.hidden} wide, the target's {target.hidden_size}"
    if card.vocabulary != target.vocabulary:
        return f"its vocabulary has {card.vocabulary} tokens, the target's {target.vocabulary}"
    loaded = model_of(target.identity)
    if card.target.rpartition("@")[2] != loaded.rpartition("@")[2]:
        return f"it was trained for {card.target}, the target is {loaded}"
    return None
