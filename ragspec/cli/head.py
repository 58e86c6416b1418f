"""`ragspec head`: make training text, train, measure and look at speculation heads."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragspec.cli.count import counted
from ragspec.settings import Settings, load_settings

if TYPE_CHECKING:
    from ragspec.decoding.request import Request
    from ragspec.decoding.target import Target
    from ragspec.heads.training import Progress

#: Seconds between two lines of progress.
_LINE_EVERY = 10.0
_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def head() -> None:
    """Train, measure and look at speculation heads.

    A head is a small network that proposes the target's next tokens from its hidden states. The default model's ships with
    ragspec; for another model, or for your own corpus, train one. RAGSPEC_HEAD chooses which one a worker uses. A published
    EAGLE-3 head, a folder with config.json and model.safetensors, can be used as it is.

    \b
    Example:
      ragspec head data heads/data
      ragspec head train heads/data heads/mine
      ragspec head eval heads/mine
      RAGSPEC_HEAD=heads/mine ragspec up
    """


@head.command()
@click.argument("out", type=_FOLDER)
@click.option("--topics", type=click.IntRange(min=1), help="So many of the built-in topics. [default: all]")
@click.option("--collection", help="Answer questions over this collection instead.")
@click.option("--questions", type=_FILE, help="With --collection: a question file, as for `ragspec submit`.")
@click.option("--job", help="Keep the answers of this job instead: its id, a prefix of it, or `last`.")
@click.option("--limit", type=click.IntRange(min=1), help="With --collection: so many questions. [default: all]")
@click.option("--top-k", type=click.IntRange(min=1), default=3, show_default=True, help="Passages of a prompt.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Of an answer.")
@click.option("--seed", type=int, default=0, show_default=True)
def data(
    out: Path,
    topics: int | None,
    collection: str | None,
    questions: Path | None,
    job: str | None,
    limit: int | None,
    top_k: int,
    max_tokens: int,
    seed: int,
) -> None:
    """Have the target write a head's training text into the folder OUT, with its hidden states.

    Without --collection it writes about built-in topics and answers questions about them: no corpus is needed, and nothing of
    yours goes into the head. With --collection it answers your questions, from the passages found for each and from memory, and
    summarises those passages; without --questions it asks about the passages itself. Ctrl-C keeps what is written, and the same
    command goes on there. Another seed, collection or file of questions adds to it; no prompt is answered twice into a folder.

    With --job nothing is answered: the answers that your workers wrote are in PostgreSQL with their passages, and the target
    reads each once more behind its prompt. That is how a head learns from production: train with --continue on that.

    A token takes two bytes for each number of a hidden state: 1.2 GB a million tokens for the default model.

    \b
    Example:
      ragspec head data heads/data
      ragspec head data heads/handbook --collection handbook --questions questions.jsonl
      ragspec head data heads/handbook --job last
    """
    from ragspec.decoding.loading import load_configured
    from ragspec.heads.data import write_answers, write_topic_answers

    _check_options(collection, job)
    settings = load_settings()
    target = load_configured(settings)
    window = min(settings.context_window, target.context_window)
    told = Told()
    try:
        if job is not None:
            written = _keep_job(settings, target, out, job, window, told)
        elif collection is None:
            written = write_topic_answers(
                target, out, topics=topics or 0, seed=seed, window=window, progress=told.recorded
            )
        else:
            requests = _corpus(
                settings, target, collection, questions, limit=limit, top_k=top_k, max_tokens=max_tokens, seed=seed
            )
            source = f"collection {collection}, questions of {questions.name if questions else 'the target'}"
            written = write_answers(target, out, requests, source=source, window=window, progress=told.recorded)
    except KeyboardInterrupt:
        click.echo(f"\nstopped; what was written to {out} can be trained on", err=True)
        sys.exit(130)
    click.echo(f"{counted(written, 'token')} written to {out}{'' if written else '; it has all these answers already'}")


#: Where `ragspec head data` takes its text from, by the option that says so, and the options that go with each.
_SOURCES: dict[str, tuple[str, ...]] = {
    "": ("topics", "seed"),
    "--collection": ("questions", "limit", "top_k", "max_tokens", "seed"),
    "--job": (),
}


def _check_options(collection: str | None, job: str | None) -> None:
    """Options that would be passed over in silence are refused."""
    if collection and job:
        raise click.UsageError("--job goes without --collection.")
    context = click.get_current_context()
    source = "--collection" if collection else "--job" if job else ""
    for name in {name for names in _SOURCES.values() for name in names}.difference(_SOURCES[source]):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option} goes {f'without {source}' if source else 'with --collection'}.")


def _keep_job(settings: Settings, target: Target, out: Path, job: str, window: int, told: Told) -> int:
    """Write a job's answers into a folder, and say which were of no use; returns the tokens written."""
    from ragspec.cli.database import job_database
    from ragspec.errors import InputError
    from ragspec.heads.data import write_job_answers
    from ragspec.heads.job_text import JobText
    from ragspec.jobs.export import stream_answers
    from ragspec.jobs.status import find_job
    from ragspec.prompt import PromptBuilder

    builder = PromptBuilder(target.tokenizer, window, settings.prompt_template, settings.passage_order)
    with job_database(settings) as engine:
        job_id = find_job(engine, job)
        text = JobText(stream_answers(engine, job_id), builder, target.identity)
        answers = list(text)
    reasons = "; ".join(f"{counted(count, 'answer')} {reason}" for reason, count in sorted(text.left_out.items()))
    if not answers:
        msg = f"Job {job_id} has no answer to learn from{f': {reasons}' if reasons else ''}."
        raise InputError(
            msg,
            "RAGSPEC_MODEL, RAGSPEC_PROMPT_TEMPLATE and RAGSPEC_PASSAGE_ORDER are to be as they were.",
            code="no_head_data",
        )
    if reasons:
        click.echo(f"left out: {reasons}", err=True)
    return write_job_answers(target, out, answers, source=f"job {job_id}", window=window, progress=told.recorded)


@head.command()
@click.argument("data", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@click.option("--architecture", default="recurrent", show_default=True, help="recurrent, mlp or attention.")
@click.option("--inner", type=click.IntRange(min=16), default=1536, show_default=True, help="Width of its layer.")
@click.option("--draft-tokens", type=click.IntRange(min=1), default=8192, show_default=True, help="Draft vocabulary.")
@click.option("--depth", type=click.IntRange(1, 16), default=4, show_default=True, help="Tokens ahead.")
@click.option("--loss", type=click.Choice(["kl", "acceptance"]), default="kl", show_default=True)
@click.option("--epochs", type=click.IntRange(min=1), default=4, show_default=True, help="Times through the data.")
@click.option("--learning-rate", type=float, default=1e-3, show_default=True)
@click.option("--patience", type=click.IntRange(min=1), default=2, show_default=True, help="Epochs without progress.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--continue", "start", type=_FOLDER, help="Go on from this head: its shape counts, not the options.")
def train(data: Path, out: Path, start: Path | None, **recipe: Any) -> None:
    """Train a head on the answers in DATA and leave the best one in the folder OUT.

    One topic or question in forty is held back with all its answers: what a head reaches there is printed after every epoch and
    decides which one is kept and when training ends. A run that was stopped goes on behind its last epoch when it is started
    again.

    \b
    Example:
      ragspec head train heads/data heads/mine
      ragspec head train heads/handbook heads/adapted --continue heads/mine --learning-rate 3e-4
    """
    from ragspec.decoding.loading import load_configured
    from ragspec.heads.report import write_report
    from ragspec.heads.training import Recipe
    from ragspec.heads.training import train as train_head

    target = load_configured(load_settings())
    told = Told()
    try:
        found = train_head(target, data, out, Recipe(**recipe), start=start, progress=told.trained)
    except KeyboardInterrupt:
        click.echo(f"\nstopped; the same command goes on behind the last whole epoch in {out}", err=True)
        sys.exit(130)
    report = write_report(out)
    click.echo(f"mean acceptance length {found.mean_acceptance_length:.3f}, head alone, on the answers held back")
    click.echo(f"head in {out}, curves in {report}")


@head.command(name="eval")
@click.argument("head_folder", metavar="HEAD", type=_FOLDER)
@click.option("--prompts", type=_FILE, multiple=True, help="JSON Lines with a field `prompt`. [default: the demo's]")
@click.option("--limit", type=click.IntRange(min=1), default=40, show_default=True, help="Prompts of a file.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Of an answer.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each file and way to draft.")
def evaluate(head_folder: Path, prompts: tuple[Path, ...], limit: int, max_tokens: int, *, as_json: bool) -> None:
    """Decode prompts with lookup alone, with the head HEAD alone and with both, one at a time.

    \b
    Example:
      ragspec head eval heads/mine
      ragspec head eval heads/mine --prompts rag.jsonl --prompts qa.jsonl
    """
    from ragspec.decoding.loading import load_configured
    from ragspec.decoding.profiling import profile_steps
    from ragspec.errors import InputError
    from ragspec.heads.checkpoint import load_head, misfit
    from ragspec.heads.evaluation import compare
    from ragspec.heads.loading import make_chain
    from ragspec.heads.prompts import read_prompts

    trained, card = load_head(head_folder)
    settings = load_settings()
    target = load_configured(settings)
    if reason := misfit(card, target):
        raise InputError(
            f"The head in {head_folder} does not fit the target: {reason}.", "RAGSPEC_MODEL names the target."
        )
    chain = make_chain(trained, target)
    window = min(settings.context_window, target.context_window)
    profile = profile_steps(target, max_batch=1, window=window)
    if not as_json:
        click.echo(
            f"{'prompts':<16}{'drafts':<8}{'tokens/step':>12}{'drafted':>9}{'accepted':>9}{'tokens/s':>10}   by place"
        )
    for path in prompts or (None,):
        requests = read_prompts(target, path, max_tokens, window)[:limit]
        for way in compare(target, chain, requests, profile, window=window, max_draft=settings.max_draft):
            row = way.figures("demo" if path is None else path.stem, profile.decode[0][0])
            if as_json:
                click.echo(json.dumps(row))
            else:
                cells = [row[name] for name in list(row)[2:6]]
                click.echo(
                    f"{row['prompts']:<16}{row['drafts']:<8}{cells[0]:>12}{cells[1]:>9}{cells[2]:>9}{cells[3]:>10}   "
                    + " ".join(f"{rate:.2f}" for rate in way.by_place[:6])
                )
    if not as_json:
        share = way.draft_step_s / profile.decode[0][0]
        click.echo(f"a draft step takes {way.draft_step_s * 1000:.2f} ms, {share:.1%} of a target step")


@head.command()
@click.argument("head_folder", metavar="[HEAD]", type=_FOLDER, required=False)
@click.option("--json", "as_json", is_flag=True, help="The card as it is.")
def info(head_folder: Path | None, *, as_json: bool) -> None:
    """Print a head's card: what it is for, how it was trained, what it was measured to do; without HEAD, the shipped ones'.

    \b
    Example:
      ragspec head info heads/mine
    """
    from dataclasses import asdict

    from ragspec.heads.card import read_head_card, shipped_heads, weights_file

    folders = [head_folder] if head_folder else shipped_heads()
    if not folders:
        click.echo("no head ships with this version; name a folder", err=True)
    for folder in folders:
        card = read_head_card(folder)
        if as_json:
            click.echo(json.dumps(asdict(card)))
            continue
        weights = weights_file(folder)
        size = weights.stat().st_size if weights.exists() else 0
        target = card.target or f"a target of {card.vocabulary:,} tokens whose states are {card.hidden} wide"
        click.echo(f"{folder}  {size / 1e6:.1f} MB")
        click.echo(f"  {card.architecture} head for {target}, {card.depth} tokens ahead, inner width {card.inner}")
        for name, value in {**card.training, **card.measured}.items():
            click.echo(f"  {name}: {value if isinstance(value, str) else json.dumps(value)}")


def _corpus(
    settings: Settings,
    target: Target,
    collection: str,
    questions: Path | None,
    *,
    limit: int | None,
    top_k: int,
    max_tokens: int,
    seed: int,
) -> Iterator[Request]:
    from ragspec.corpus.embedder import load_embedder
    from ragspec.corpus.retriever import load_retriever
    from ragspec.corpus.store import open_store, texts
    from ragspec.heads.data import BATCH
    from ragspec.heads.texts import corpus_requests, written_questions
    from ragspec.prompt import PromptBuilder

    window = min(settings.context_window, target.context_window)
    builder = PromptBuilder(target.tokenizer, window, settings.prompt_template, settings.passage_order)
    if questions is None:
        with open_store(settings) as store:
            # Asked before the first is answered: two engines at once would share the memory.
            asked = list(written_questions(target, texts(store.open(collection)), batch=BATCH, window=window))
    else:
        asked = list(_read_questions(questions))
    retriever = load_retriever(settings, load_embedder(settings))
    random.Random(seed).shuffle(asked)  # noqa: S311 - nothing secret
    return corpus_requests(target.tokenizer, builder, retriever, collection, asked[:limit], top_k, max_tokens)


def _read_questions(path: Path) -> Iterator[str]:
    from producer.formats import detect
    from producer.source import open_source
    from producer.submit import read_rows
    from ragspec.jobs.row import ParsedRow

    with open_source(str(path)) as source:
        for row in read_rows(source, detect(source)):
            if isinstance(row, ParsedRow):
                yield row.text
            else:
                click.echo(f"{path}, line {row.line}: {row.message} It is left out.", err=True)


class Told:
    """Says how far something is, now and then, on standard error."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def recorded(self, kind: str, answers: int, tokens: int) -> None:
        """An answer was written."""
        if self._due():
            speed = tokens / (time.monotonic() - self._began)
            click.echo(f"{tokens:,} tokens ({speed:.0f}/s); {kind}: {counted(answers, 'answer')}", err=True)

    def trained(self, progress: Progress) -> None:
        """A training run spoke."""
        if progress.by_place is not None:
            places = " ".join(f"{rate:.3f}" for rate in progress.by_place)
            click.echo(
                f"epoch {progress.epoch + 1}: mean acceptance length {progress.mean_acceptance_length:.3f}, by place {places}",
                err=True,
            )
        elif self._due():
            share = progress.step / progress.steps
            click.echo(
                f"epoch {progress.epoch + 1}, step {progress.step:,} of {progress.steps:,} ({share:.0%}), "
                f"loss {progress.loss:.3f}, {progress.seconds / 60:.1f} min",
                err=True,
            )

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._last < _LINE_EVERY:
            return False
        self._last = now
        return True
