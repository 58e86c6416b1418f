"""The head that the settings name, ready to draft for a target."""

from __future__ import annotations

import logging
from pathlib import Path

from ragspec.decoding.feature_drafter import make_head_drafter
from ragspec.decoding.head_drafter import ChainHead, HeadDrafter
from ragspec.decoding.native.head import NativeHead
from ragspec.decoding.native.target import NativeTarget
from ragspec.decoding.native.weights import mixable
from ragspec.decoding.target import Target
from ragspec.errors import InputError, SettingsError
from ragspec.heads.architecture import Head, StateHead
from ragspec.heads.attention import AttentionHead
from ragspec.heads.attention_chain import AttentionChain
from ragspec.heads.card import NONE, bad_setting, chosen_head, read_head_card, shipped_heads
from ragspec.heads.chain import TorchChain
from ragspec.heads.checkpoint import head_identity, load_head, misfit
from ragspec.heads.recurrent import RecurrentHead

log = logging.getLogger(__name__)


def find_head(name: str, target: Target) -> Path | None:
    """The folder of the head that RAGSPEC_HEAD means.

    Args:
        name: `auto` for the shipped head of this target if there is one, `none`, or a folder.
        target: whose tokens it is to propose.

    Returns:
        None where no head is to draft.

    Raises:
        SettingsError: the folder holds no head, or one that does not fit the target; the message says why.
    """
    if name == NONE:
        return None
    chosen = chosen_head(name)
    if chosen is None:
        return next((folder for folder in shipped_heads() if misfit(read_head_card(folder), target) is None), None)
    folder, card = chosen
    if reason := misfit(card, target):
        msg = f"RAGSPEC_HEAD={name} does not fit the target: {reason}."
        raise SettingsError(msg, "Train one for this target with `ragspec head train`, or set RAGSPEC_HEAD=auto.")
    return folder


def load_head_drafter(name: str, target: Target) -> HeadDrafter | None:
    """The head that RAGSPEC_HEAD means, ready to draft; see `find_head`."""
    folder = find_head(name, target)
    if folder is None:
        log.info("no speculation head drafts", extra={"action": "load_head"})
        return None
    try:
        head, card = load_head(folder)
    except InputError as error:
        raise bad_setting(name, error.message) from error
    identity = head_identity(folder, card)
    log.info("speculation head loaded", extra={"action": "load_head", "folder": str(folder), "head": identity})
    return make_head_drafter(make_chain(head, target), identity, head.longest_draft)


def make_chain(head: Head, target: Target) -> ChainHead:
    """A head ready to draft: in 8 bits where the kernels run both it and the target, else in torch."""
    shape = head.shape
    if (
        isinstance(target, NativeTarget)
        and isinstance(head, RecurrentHead)
        and mixable(2 * shape.hidden)
        and mixable(shape.inner)
    ):
        return NativeHead(head.weights(), shape.draft_tokens, target.decoder, shape.epsilon)
    if isinstance(head, AttentionHead):
        return AttentionChain(head, target)
    if isinstance(head, StateHead):
        return TorchChain(head, target)
    msg = f"nothing drafts with a head of the architecture {head.architecture!r}"
    raise TypeError(msg)
