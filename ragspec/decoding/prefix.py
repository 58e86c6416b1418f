"""Which slot holds the longest prefix of a prompt.

A trie over blocks of tokens, as vLLM's prefix caching hashes them, but over whole slots: each node is a block behind the
blocks of its parents and knows the slots that hold it. A lookup walks one block a step and compares token by token only at
its end, so its cost is that of the prompt's blocks plus one block a slot, whatever the slots hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

#: Tokens of a block: long enough for few dictionary entries, short enough that the comparison at the end stays small.
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix that any slot shares with a text.

    Attributes:
        length: tokens shared.
        slots: who shares so many; empty where nobody shares any.
    """

    length: int = 0
    slots: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Node:
    slots: set[int] = field(default_factory=set)
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixIndex:
    """The texts of slots, searched by prefix."""

    def __init__(self) -> None:
        self._root = _Node()
        self._texts: dict[int, list[int]] = {}
        #: Per slot, the root and the node of each of its whole blocks.
        self._paths: dict[int, list[_Node]] = {}

    def length(self, slot: int) -> int:
        """Tokens that a slot is known to hold."""
        return len(self._texts.get(slot, ()))

    def text(self, slot: int) -> Sequence[int]:
        """Those tokens."""
        return self._texts.get(slot, ())

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """A slot holds these tokens behind what it held."""
        text = self._texts.setdefault(slot, [])
        path = self._paths.setdefault(slot, [self._root])
        self._root.slots.add(slot)
        text.extend(tokens)
        for end in range(BLOCK * len(path), len(text) + 1, BLOCK):
            node = path[-1].children.setdefault(tuple(text[end - BLOCK : end]), _Node())
            node.slots.add(slot)
            path.append(node)

    def cut(self, slot: int, length: int) -> None:
        """A slot holds no more than its first `length` tokens."""
        text, path = self._texts.get(slot), self._paths.get(slot)
        if text is None or path is None:
            return
        while len(path) - 1 > length // BLOCK:
            node = path.pop()
            node.slots.discard(slot)
            if not node.slots:
                end = BLOCK * len(path)
                del path[-1].children[tuple(text[end - BLOCK : end])]
        del text[length:]
        if not text:
            self._root.slots.discard(slot)
            del self._texts[slot], self._paths[slot]

    def longest(self, tokens: Sequence[int], skip: AbstractSet[int] = frozenset()) -> Match:
        """Who shares the longest prefix with `tokens`, slots in `skip` left out."""
        node, depth = self._root, 0
        while (
            child := node.children.get(tuple(tokens[depth : depth + BLOCK]))
        ) is not None and not child.slots <= skip:
            node, depth = child, depth + BLOCK
        ending = tokens[depth : depth + BLOCK]
        shared = {slot: depth + _common(ending, self._texts[slot][depth : depth + BLOCK]) for slot in node.slots - skip}
        length = max(shared.values(), default=0)
        return Match(length, tuple(slot for slot, own in shared.items() if own == length)) if length else Match()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))
