"""`ragspec ingest`, `ragspec collections`, `ragspec search`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ragspec.cli.count import counted
from ragspec.settings import load_settings

if TYPE_CHECKING:
    from ragspec.corpus.ingest import IngestReport, Progress
    from ragspec.corpus.passage import Passage

#: sysexits EX_DATAERR: some of the input could not be read; what could be is kept.
_SOME_FAILED = 65
#: Seconds between two lines of progress where there is no terminal to draw a bar on.
_LINE_EVERY = 10.0


@click.command()
@click.argument("paths", nargs=-1, required=True)
@click.option("--collection", required=True, help="Where to; made where there is none.")
@click.option("--prune", is_flag=True, help="Delete what the collection has from PATHS that is there no longer.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def ingest(paths: tuple[str, ...], collection: str, *, prune: bool, as_json: bool) -> None:
    """Read documents into a collection.

    PATHS are files, folders (with all below them) or quoted glob patterns. Formats: .txt, .md, .html, .pdf, .docx, and
    .jsonl(.gz) of passages, one a line: {"id": "...", "text": "...", "title": "...", "metadata": {...}}. Such passages
    are kept whole under their own ids; documents are cut into passages of RAGSPEC_CHUNK_TOKENS tokens. Hidden files
    are passed over.

    Ingesting again leaves unchanged documents alone and replaces changed ones. A file or line that cannot be read is
    reported on standard error and the rest go on; the exit status is then 65, and what was read is kept.

    \b
    Example:
      ragspec ingest docs/ notes.pdf --collection handbook
      ragspec ingest 'docs/**/*.md' --collection handbook
      ragspec ingest docs/ --collection handbook --prune
    """
    from ragspec.corpus.embedder import load_embedder
    from ragspec.corpus.ingest import ingest as bring_up_to_date
    from ragspec.corpus.naming import check_name
    from ragspec.corpus.store import open_store

    check_name(collection)
    settings = load_settings()
    with open_store(settings) as store:
        embedder = load_embedder(settings, _tell)
        with _progress() as progress:
            report = bring_up_to_date(settings, store, embedder, paths, collection, prune=prune, progress=progress)
    _print_report(report, collection, as_json=as_json)
    if report.failed:
        sys.exit(_SOME_FAILED)


@click.command()
@click.option("--documents", is_flag=True, help="Count documents too; this reads every passage's metadata.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per collection.")
@click.option("--delete", "doomed", metavar="NAME", help="Delete this collection.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
def collections(*, documents: bool, as_json: bool, doomed: str | None, yes: bool) -> None:
    """List collections, or delete one.

    \b
    Example:
      ragspec collections
      ragspec collections --documents
      ragspec collections --delete handbook --yes
    """
    from ragspec.corpus.store import open_store

    with open_store(load_settings()) as store:
        if doomed is not None:
            info = store.describe(doomed)
            if not yes:
                click.confirm(f"Delete {doomed} and its {counted(info.passages, 'passage')}?", abort=True)
            store.delete(doomed)
            click.echo(f"Deleted {doomed}.")
            return
        rows = [asdict(store.describe(name)) for name in store.names()]
        if documents:
            rows = [{**row, "documents": store.count_documents(row["name"])} for row in rows]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    elif not rows:
        click.echo("There is no collection yet: `ragspec ingest PATH --collection NAME` makes one.")
    else:
        width = max(len("collection"), *(len(row["name"]) for row in rows))
        counts = ("passages", "documents") if documents else ("passages",)
        click.echo("  ".join([f"{'collection':<{width}}", *(f"{name:>9}" for name in counts), "embedder"]))
        for row in rows:
            embedder = row["embedder"] or "(not built by ragspec)"
            click.echo("  ".join([f"{row['name']:<{width}}", *(f"{row[name]:>9}" for name in counts), embedder]))


@click.command()
@click.argument("question")
@click.option("--collection", required=True, help="Where to look.")
@click.option("--top-k", default=3, show_default=True, type=click.IntRange(1, 100), help="How many passages.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per passage.")
def search(question: str, collection: str, top_k: int, *, as_json: bool) -> None:
    """Look at what a question retrieves.

    \b
    Example:
      ragspec search "How long is the notice period?" --collection handbook
    """
    from ragspec.corpus.embedder import load_embedder
    from ragspec.corpus.retriever import load_retriever
    from ragspec.corpus.store import check_collection

    settings = load_settings()
    check_collection(settings, collection)
    retriever = load_retriever(settings, load_embedder(settings, _tell))
    (passages,) = retriever.retrieve([question], collection, top_k)
    for rank, passage in enumerate(passages, 1):
        click.echo(json.dumps(asdict(passage), ensure_ascii=False) if as_json else _shown(rank, passage))


def _shown(rank: int, passage: Passage) -> str:
    head = f"{rank}. {passage.score:.3f}  {passage.document}  [{passage.id}]"
    title = f"\n   {passage.title}" if passage.title and passage.title != passage.document else ""
    text = "\n".join(f"   {line}" for line in passage.text.splitlines())
    return click.style(head, bold=True) + title + "\n" + text + "\n"


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _print_report(report: IngestReport, collection: str, *, as_json: bool) -> None:
    for failed in report.failures:
        place = f"{failed.path}:{failed.line}" if failed.line else failed.path
        click.echo(f"{place}: [{failed.code}] {failed.reason}", err=True)
    if report.failed > len(report.failures):
        click.echo(f"... and {counted(report.failed - len(report.failures), 'more line')}.", err=True)
    if as_json:
        click.echo(json.dumps({"collection": collection, **asdict(report)}))
        return
    click.echo(
        f"{collection}: {counted(report.added, 'document')} added, {report.replaced} replaced, "
        f"{report.unchanged} unchanged, {report.removed} removed; {counted(report.written, 'passage')} written; "
        f"{counted(report.failed, 'failure')}."
    )
    if report.unknown == 1:
        click.echo("1 file of another format was passed over.")
    elif report.unknown:
        click.echo(f"{report.unknown} files of other formats were passed over.")


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, a line now and then elsewhere; both on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from ragspec.corpus.ingest import Progress

    if not sys.stderr.isatty():
        yield _progress_lines()
        return
    columns: list[Any] = [TextColumn("Ingesting"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()]
    with Bar(*columns, TextColumn("{task.fields[passages]} passages"), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, passages=0)
        done = [0]

        def written(passages: int) -> None:
            done[0] += passages
            bar.update(task, passages=done[0])

        yield Progress(
            begin=lambda total: bar.update(task, total=total),
            read=lambda size: bar.advance(task, size),
            written=written,
        )


def _progress_lines() -> Progress:
    from ragspec.corpus.ingest import Progress

    done, last = [0], [time.monotonic()]

    def written(passages: int) -> None:
        done[0] += passages
        if time.monotonic() - last[0] >= _LINE_EVERY:
            last[0] = time.monotonic()
            click.echo(f"{done[0]} passages written ...", err=True)

    return Progress(written=written)
