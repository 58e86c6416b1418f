"""When an answer ends. Checked token by token in emission order, so a draft changes nothing: end token first, then stop
strings, then the length limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BYTES_OF_A_CHARACTER = 4
_REPLACEMENT = "\ufffd"


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of tokens, special tokens left out and nothing tidied."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def holds_stop(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether the newest token completed a stop string.

    Only the tail that can hold one is decoded: a token gives at least one byte, a character takes at most four; one token
    more keeps tokenizers that strip a leading space from touching the tail. Where tokens are bytes, a tail can begin
    inside a character and spoil what follows it, so up to three tokens more are tried until it does not.
    """
    longest = max(map(len, stops), default=0)
    if not longest:
        return False
    for more in range(_BYTES_OF_A_CHARACTER):
        tail = decode(tokenizer, tokens[-(_BYTES_OF_A_CHARACTER * longest + 1 + more) :])
        if any(stop and stop in tail for stop in stops):
            return True
        if _REPLACEMENT not in tail:
            return False
    return False


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    found = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
