"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`: for nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
