"""The text of an answer's tokens, by the target's tokenizer alone: neither torch nor transformers is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.models import find_model, model_identity
from ragspec.settings import Settings

if TYPE_CHECKING:
    from ragspec.jobs.answer import Answer

#: Tokens before one that decide how it is written: a character may span as many as its bytes, a word its space.
_CONTEXT = 8


def token_texts(settings: Settings, answer: Answer) -> list[str] | None:
    """What each token adds to the text; None where the target that answered, or its tokenizer, is not here."""
    folder = find_model(settings.model, settings.models_folder)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    identity = model_identity(settings.model, folder)
    # Behind the identity stands the precision, since there are several; the tokens are the same in each.
    if answer.model != identity and not answer.model.startswith(f"{identity}+"):
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = []
    for position in range(len(answer.token_ids)):
        before = answer.token_ids[max(0, position - _CONTEXT) : position]
        with_it = tokenizer.decode([*before, answer.token_ids[position]], skip_special_tokens=False)
        without = tokenizer.decode(before, skip_special_tokens=False) if before else ""
        # A character whose bytes are not all there yet is written as a replacement; its last token shows it.
        without = without.rstrip("\N{REPLACEMENT CHARACTER}")
        texts.append(with_it.removeprefix(without).rstrip("\N{REPLACEMENT CHARACTER}"))
    return texts
