"""The answers of jobs as training text: what was decoded in production teaches the head how this corpus is answered.

Nothing is kept for it. PostgreSQL has every answer's tokens and passages, so its prompt can be written again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ragspec.corpus.passage import Passage
from ragspec.errors import InputError
from ragspec.heads.checkpoint import model_of
from ragspec.heads.replay import Written
from ragspec.heads.texts import PromptName
from ragspec.jobs.answer import Answer
from ragspec.prompt import PromptBuilder

#: Why an answer is no training text.
FAILED, OTHER_MODEL, OTHER_TEMPLATE, OTHER_PROMPT = (
    "failed or empty",
    "written by another model",
    "written with another prompt template or order of passages",
    "whose prompt comes out with another length",
)


class JobText:
    """Answers with the prompts that they were written for.

    Args:
        answers: (custom_id, question, answer) each, as `ragspec.jobs.export.stream_answers` gives them.
        builder: as the worker had it: the same template and order of passages.
        identity: of the target that is to learn.
    """

    def __init__(self, answers: Iterable[tuple[str, str, Answer]], builder: PromptBuilder, identity: str) -> None:
        self._answers = answers
        self._builder = builder
        self._model = model_of(identity)
        #: Answers that were left out, by reason.
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Written]:
        """Those that the target wrote and whose prompts are known to the token; questions that began alike come together."""
        return iter(sorted(self._usable(), key=lambda written: written.prompt))

    def _usable(self) -> Iterator[Written]:
        for _, question, answer in self._answers:
            prompt = self._prompt(question, answer)
            if isinstance(prompt, str):
                self.left_out[prompt] += 1
            else:
                name = PromptName("rag", answer.idx, question)
                yield Written(str(name), prompt, tuple(answer.token_ids), answer.text)

    def _prompt(self, question: str, answer: Answer) -> tuple[int, ...] | str:
        """The prompt, or why there is none."""
        if answer.status != "completed" or not answer.token_ids:
            return FAILED
        if model_of(answer.model) != self._model:
            return OTHER_MODEL
        if answer.template_hash != self._builder.template_hash:
            return OTHER_TEMPLATE
        passages = [Passage(**passage) for passage in answer.passages]
        try:
            # These passages were cut to fit beside the answer's room; they are not cut again.
            prompt = self._builder.build(question, passages, max_tokens=1).token_ids
        except InputError:
            return OTHER_PROMPT
        return prompt if len(prompt) == answer.prompt_tokens else OTHER_PROMPT
