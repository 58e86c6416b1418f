"""When an answer ends. Checked token by token in emission order, so a draft changes nothing: end token first, then stop
strings, then the length limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BYTES_OF_A_CHARACTER = 4
#: What a tokenizer gives for bytes that are no whole character.
REPLACEMENT = "\ufffd"


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of tokens, special tokens left out and nothing tidied."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def holds_stop(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], stops: Sequence[str], min_tokens: int = 0
) -> bool:
    """Whether the newest token completed a stop string, behind the first `min_tokens`.

    Only the tail that can hold one is decoded: a token gives at least one byte, a character takes at most four; one token
    more keeps tokenizers that strip a leading space from touching the tail. Where tokens are bytes, a tail can begin
    inside a character and spoil what follows it, so up to three tokens more are tried until it does not.
    """
    longest = max(map(len, stops), default=0)
    if not longest or len(tokens) <= min_tokens:
        return False
    for more in range(_BYTES_OF_A_CHARACTER):
        first = max(0, len(tokens) - (_BYTES_OF_A_CHARACTER * longest + 1 + more))
        tail = decode(tokenizer, tokens[first:])
        barred = _barred(tokenizer, tokens[first : max(first, min_tokens)])
        if any(_find(tail, stop, barred) is not None for stop in stops):
            return True
        if REPLACEMENT not in tail:
            return False
    return False


def answer_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], stops: Sequence[str], min_tokens: int = 0
) -> str:
    """The text of an answer, cut before the first stop string completed behind its first `min_tokens`."""
    text = decode(tokenizer, tokens)
    barred = _barred(tokenizer, tokens[:min_tokens]) if stops else 0
    found = [place for stop in stops if (place := _find(text, stop, barred)) is not None]
    return text[: min(found)] if found else text


def _barred(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> int:
    """How many characters these tokens complete; one that they only begin is not among them."""
    return len(decode(tokenizer, tokens).rstrip(REPLACEMENT)) if tokens else 0


def _find(text: str, stop: str, barred: int) -> int | None:
    """Where `stop` begins first such that it ends behind the first `barred` characters."""
    place = text.find(stop, max(0, barred - len(stop) + 1)) if stop else -1
    return None if place < 0 else place
