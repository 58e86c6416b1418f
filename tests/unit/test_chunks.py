"""Passages cover a text, fit their size, and are cut where a reader would cut."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.corpus.chunks import split_text


def words(text: str) -> list[tuple[int, int]]:
    """A tokenizer of words and single punctuation marks."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def edgy(text: str) -> list[tuple[int, int]]:
    """A tokenizer that needs one token more for a text's first letter, as byte-pair encodings may."""
    return [(0, 1), *words(text)] if text else []


TEXTS = st.text(alphabet=st.sampled_from(list("ab1.!?# \n\té漢-")), max_size=400)


@pytest.mark.parametrize("tokenizer", [words, edgy])
@given(text=TEXTS, size=st.integers(2, 20), overlap=st.integers(0, 19))
def test_passages_cover_the_text_in_order_and_fit(tokenizer, text: str, size: int, overlap: int) -> None:
    passages = split_text(text, tokenizer, size, min(overlap, size - 1))

    covered = {place for start, end in passages for place in range(start, end)}
    assert {place for place, character in enumerate(text) if not character.isspace()} <= covered
    assert passages == sorted(passages)
    for start, end in passages:
        assert len(tokenizer(text[start:end])) <= size
        assert text[start:end] == text[start:end].strip() != ""


@given(text=TEXTS, size=st.integers(2, 20))
def test_without_overlap_no_character_is_twice_in_a_passage(text: str, size: int) -> None:
    passages = split_text(text, words, size)

    assert all(before[1] <= after[0] for before, after in itertools.pairwise(passages))


def test_a_text_that_fits_is_one_passage() -> None:
    assert split_text("  one two three\n", words, 3, 2) == [(2, 15)]


def test_headings_are_cut_at_before_paragraphs_and_paragraphs_before_sentences() -> None:
    text = "# A\n\none two. three four.\n\nfive six.\n\n# B\n\nseven eight nine ten."
    cut = [text[start:end] for start, end in split_text(text, words, 9)]

    assert cut == ["# A\n\none two. three four.", "five six.", "# B\n\nseven eight nine ten."]


def test_neighbours_share_whole_words_of_the_text_before() -> None:
    text = "alpha beta gamma delta epsilon zeta eta theta"
    first, second, *_ = (text[start:end] for start, end in split_text(text, words, 4, 2))

    assert (first, second) == ("alpha beta", "alpha beta gamma delta")


def test_a_word_that_the_tokenizer_swallows_whole_is_cut_by_its_length() -> None:
    """WordPiece makes one `[UNK]` of a page of base64; a passage of it would fill any prompt."""
    blob = "A" * 1000

    passages = split_text(blob, lambda text: [(0, len(text))], 16)

    assert sum(end - start for start, end in passages) == 1000
    assert max(end - start for start, end in passages) <= 16 * 8
