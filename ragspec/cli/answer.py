"""One answer on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragspec.decoding.acceptance import Source
from ragspec.jobs.answer import Answer

_STYLES = {
    Source.TARGET: "default",
    Source.PASSAGE: "green",
    Source.PROMPT: "cyan",
    Source.ANSWER: "yellow",
    Source.HEAD: "magenta",
    Source.JOB: "blue",
}
_COLUMNS = ("step", "drafted", "accepted", "tokens")
#: Characters of a passage that are shown.
_EXCERPT = 300


def print_answer(custom_id: str, question: str, answer: Answer, texts: list[str] | None) -> None:
    """Print an answer; without a terminal there are no colours, and every token's source is written out instead.

    Args:
        custom_id: the question's name.
        question: its text.
        answer: the answer.
        texts: what each token adds to the text, or None where that is not known.
    """
    console = Console(highlight=False, soft_wrap=True)
    sources = [Source(source) for source in answer.token_sources]
    console.print(Text.assemble((custom_id, "bold"), "  ", question))
    console.print()
    if answer.status == "failed":
        console.print(Text(f"failed [{answer.error_code}]: {answer.error_message}", style="red"))
    elif texts is None:
        console.print(Text(answer.text))
    else:
        console.print(Text.assemble(*((text, _STYLES[by]) for text, by in zip(texts, sources, strict=True))))
    if sources:
        console.print()
        console.print(_legend(sources))
        console.print(
            f"{answer.num_accepted_draft_tokens}/{answer.num_draft_tokens} draft tokens accepted, "
            f"{answer.mean_acceptance_length:.2f} tokens/step, finished by {answer.finish_reason}, {answer.model}"
        )
        steps = _steps(answer, sources, texts or [str(token) for token in answer.token_ids])
        if console.is_terminal:
            console.print(_table(steps))
        else:  # a table is cut to a width, which only a terminal has
            for step, drafted, accepted, tokens in ((*_COLUMNS[:3], Text(_COLUMNS[3])), *steps):
                console.print(Text(f"{step:<4}  {drafted:<7}  {accepted:<8}  ") + tokens)
    for number, passage in enumerate(answer.passages, 1):
        console.print()
        heading = f"[{number}] {passage['score']:.3f}  {passage['document']}  {passage['title']}"
        console.print(Text(heading.rstrip(), style="bold"))
        excerpt = passage["text"]
        console.print(Text(excerpt if len(excerpt) <= _EXCERPT else f"{excerpt[:_EXCERPT]}..."))


def _legend(sources: Sequence[Source]) -> Text:
    counted = ((by, sources.count(by)) for by in Source)
    return Text("  ").join(Text(f"{by.name.lower()} {count}", _STYLES[by]) for by, count in counted if count)


def _steps(answer: Answer, sources: Sequence[Source], texts: Sequence[str]) -> Iterator[tuple[str, str, str, Text]]:
    """The cells under `_COLUMNS`, one row a verify step; step 0 is the prompt's own pass."""
    for step, drafted, accepted, positions in _ranges(answer):
        tokens = Text(" ").join(
            Text(f"{texts[position]!r}:{sources[position].name.lower()}", _STYLES[sources[position]])
            for position in positions
        )
        yield str(step), drafted, accepted, tokens


def _table(steps: Iterable[tuple[str, str, str, Text]]) -> Table:
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for step in steps:
        table.add_row(*step)
    return table


def _ranges(answer: Answer) -> Iterator[tuple[int, str, str, range]]:
    yield 0, "", "", range(1)
    start = 1
    for step, (drafted, accepted) in enumerate(
        zip(answer.per_step_drafted, answer.per_step_accepted, strict=True), start=1
    ):
        # Cut inside its draft, the last step lacks the target's own token.
        end = min(start + accepted + 1, len(answer.token_ids))
        yield step, str(drafted), str(accepted), range(start, end)
        start = end
