"""Where passages stand in a prompt."""

from __future__ import annotations

from itertools import permutations

from ragspec.corpus.passage import Passage
from ragspec.prompt.arrangement import arrange
from ragspec.prompt.builder import PromptBuilder
from tests import tiny


def passage(name: str, text: str) -> Passage:
    return Passage(name, text, 0.5, "doc")


SHORT, OTHER, LONG = passage("b", "short"), passage("a", "other"), passage("c", "the longest")


def test_by_score_they_stand_as_they_were_found() -> None:
    assert arrange([SHORT, LONG, OTHER], "score") == [SHORT, LONG, OTHER]


def test_shared_depends_on_which_they_are_and_not_on_their_scores() -> None:
    """The longest is last, where the default template shows it first."""
    for found in permutations([SHORT, OTHER, LONG]):
        assert arrange(found, "shared") == [OTHER, SHORT, LONG]


def test_prompts_over_the_same_passages_begin_alike_up_to_the_question() -> None:
    builder = PromptBuilder(tiny.tokenizer(), 2000, passage_order="shared")
    first = builder.build("Who?", [SHORT, OTHER, LONG], 50)
    second = builder.build("When?", [LONG, SHORT, OTHER], 50)

    tokens = first.token_ids[: max(end for _, end in first.passage_spans)]
    assert second.token_ids[: len(tokens)] == tokens
    assert second.used == (LONG, SHORT, OTHER)
    assert len(second.passage_spans) == 3


def test_what_does_not_fit_is_still_the_worst() -> None:
    """The order decides where passages stand, not which are left out."""
    worst = passage("w", "worst " * 40)
    whole = len(PromptBuilder(tiny.tokenizer(), 4000).build("Who?", [SHORT, LONG, worst], 50).token_ids)
    builder = PromptBuilder(tiny.tokenizer(), whole - 100 + 50, passage_order="shared")
    prompt = builder.build("Who?", [SHORT, LONG, worst], 50)

    assert prompt.used[:2] == (SHORT, LONG)
    assert len(prompt.used[2].text) < len(worst.text)


def test_the_order_is_part_of_the_recorded_hash() -> None:
    hashes = {PromptBuilder(tiny.tokenizer(), 400, passage_order=order).template_hash for order in ("score", "shared")}

    assert len(hashes) == 2
