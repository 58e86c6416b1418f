"""Which walker leads which head."""

from __future__ import annotations

from ragspec.decoding.target import Target
from ragspec.heads.architecture import Head, StateHead
from ragspec.heads.attention import AttentionHead
from ragspec.heads.attention_walk import AttentionWalker
from ragspec.heads.walk import StateWalker, Walker


def make_walker(head: Head, target: Target) -> Walker:
    """Whoever leads a head along what its target wrote.

    Raises:
        TypeError: nobody knows how.
    """
    if isinstance(head, AttentionHead):
        return AttentionWalker(head, target)
    if isinstance(head, StateHead):
        return StateWalker(head, target)
    msg = f"nobody leads a head of the architecture {head.architecture!r}"
    raise TypeError(msg)
