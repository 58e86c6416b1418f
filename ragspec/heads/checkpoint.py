"""A head on disk: its weights in safetensors beside its card."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ragspec.decoding.attention import Segment
from ragspec.decoding.target import Target
from ragspec.errors import InputError
from ragspec.heads import eagle3_weights
from ragspec.heads.architecture import Head, make_head
from ragspec.heads.card import CARD, WEIGHTS, HeadCard, is_published, read_head_card, weights_file
from ragspec.heads.shape import AttentionShape, feature_layers

_DRAFT_TOKENS = "draft_tokens"


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


def load_head(folder: Path) -> tuple[Head, HeadCard]:
    """Read a head, in float32 on CPU.

    Raises:
        InputError: the files are missing, damaged or of another shape than the card says (code `bad_head`).
    """
    card = read_head_card(folder)
    try:
        if is_published(folder):
            tokens, tensors = eagle3_weights.read_weights(folder, card.vocabulary)
        else:
            tensors = load_file(folder / WEIGHTS)
            tokens = tuple(map(int, tensors.pop(_DRAFT_TOKENS).tolist()))
        head = make_head(card.architecture, card.shape(tokens))
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
    with weights_file(folder).open("rb") as file:
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
    if card.target and card.target.rpartition("@")[2] != loaded.rpartition("@")[2]:
        return f"it was trained for {card.target}, the target is {loaded}"
    layer = card.attention_shape()
    return None if layer is None else _unreadable(layer, target)


@torch.inference_mode()
def _unreadable(layer: AttentionShape, target: Target) -> str | None:
    """Why a target does not give the states between its layers as a head reads them; None where it does. Computes one token."""
    layers = feature_layers(layer, target.layers)
    if not target.layers:
        return "it reads states between the target's layers, and these cannot be had"
    if not 0 <= min(layers) <= max(layers) <= target.layers:
        return f"it reads the inputs of layers {layers}, the target has {target.layers}"
    wanted = [1, len(layers), target.hidden_size]
    try:
        given = target.forward(target.make_cache(1, 1), [Segment(0, 0, 1)], [0], [0], features=layers).features
        found = None if given is None else list(given.shape)
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        return f"it reads the states that enter layers {layers}, and the target does not give them: {error}"
    if found != wanted:
        return f"it reads the states that enter layers {layers}; of one token they are {found}, not {wanted}"
    return None
