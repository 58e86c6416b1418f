"""The demo's questions as prompts, without a store: each with passages of the topic that answers it."""

from __future__ import annotations

from pydoc_data.topics import topics

from ragspec.corpus.passage import Passage
from ragspec.demo import questions
from ragspec.prompt import Prompt, PromptBuilder

#: Passages of a prompt.
PASSAGES = 3


def demo_prompts(builder: PromptBuilder, max_tokens: int, *, passage_chars: int = 1000) -> list[Prompt]:
    """A retrieval-augmented prompt for each of the demo's questions, of three passages of `passage_chars` characters."""
    prompts = []
    for row in questions():
        name = row["passage_id"].removeprefix("python-reference/").removesuffix(".txt")
        text = topics[name]
        pieces = [text[i * passage_chars : (i + 1) * passage_chars] for i in range(PASSAGES)]
        passages = [Passage(f"{name}-{i}", piece, 0.0, row["passage_id"]) for i, piece in enumerate(pieces) if piece]
        prompts.append(builder.build(row["question"], passages, max_tokens))
    return prompts
