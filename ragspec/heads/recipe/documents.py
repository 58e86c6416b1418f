"""From archives to documents, and from documents to passages."""

from __future__ import annotations

import gzip
import html
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ragspec.corpus.chunks import split_text
from ragspec.corpus.parse import parse_document
from ragspec.errors import InputError
from ragspec.heads.recipe.sources import Source

#: Words of a passage at most, and of the least that is worth asking about.
PASSAGE_WORDS, _LEAST_WORDS = 110, 25
#: Endings of a user's own texts.
_ENDINGS = (".txt", ".md")
_BREAK, _TAG = re.compile(r"</?(?:p|br|li|ul|ol|note|h\d)\b[^>]*>"), re.compile(r"<[^>]+>")


@dataclass(frozen=True, slots=True)
class Document:
    """A document, cut up.

    Attributes:
        title: of the document; answers about one document are held back together.
        passages: in their order.
    """

    title: str
    passages: tuple[str, ...]


def read_source(source: Source, archive: Path) -> list[Document]:
    """The documents of an archive, in the order of its members' names."""
    read = _READERS[source.name]
    found = [_cut(*read(json.loads(content))) for content in _members(archive, source.members)]
    return [document for document in found if document.passages]


def read_folder(folder: Path) -> list[Document]:
    """The `.txt` and `.md` files under a folder, by name.

    Raises:
        InputError: there is none, or one is no text (code `no_text`, or the parser's).
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _ENDINGS and path.is_file())
    found = [_cut(path.stem, parse_document(path.read_bytes(), path.suffix).text) for path in paths]
    documents = [document for document in found if document.passages]
    if not documents:
        msg = f"{folder} holds no text of {_LEAST_WORDS} words or more in {' or '.join(_ENDINGS)} files."
        raise InputError(msg, "Give a folder that does.", code="no_text")
    return documents


def _cut(title: str, text: str) -> Document:
    spans = split_text(text, _word_spans, PASSAGE_WORDS)
    cut = (text[start:end] for start, end in spans)
    return Document(title, tuple(passage for passage in cut if len(_word_spans(passage)) >= _LEAST_WORDS))


def _word_spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\S+", text)]


def _members(archive: Path, pattern: str) -> Iterator[bytes]:
    """The contents of those members of a wheel or tarball whose names fit, unpacked where they are gzipped."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                if fnmatch(name, pattern):
                    content = wheel.read(name)
                    yield gzip.decompress(content) if name.endswith(".gz") else content
        return
    with tarfile.open(archive) as tarball:
        for member in sorted(tarball.getmembers(), key=lambda member: member.name):
            file = tarball.extractfile(member) if fnmatch(member.name, pattern) else None
            if file is not None:
                yield file.read()


def _plain(markup: str) -> str:
    """HTML as text, paragraphs on lines of their own."""
    lines = _TAG.sub("", _BREAK.sub("\n", markup)).splitlines()
    return "\n".join(filter(None, (" ".join(html.unescape(line).split()) for line in lines)))


def _factbook(profile: Any) -> tuple[str, str]:
    """A country's name, and a line `field: what is said` for each of its fields."""
    names = profile.get("Government", {}).get("Country name", {})
    found = (_field(names.get(f"conventional {form} form", {})) for form in ("short", "long"))
    name = next((name for name in found if name not in {"", "none"}), "the world")
    chapters = [
        "\n".join(f"{field}: {said}" for field, value in chapter.items() if (said := _field(value)))
        for chapter in profile.values()
    ]
    return name, "\n\n".join(chapters)


def _field(value: Any) -> str:
    """What a field and its parts say, in one line."""
    if isinstance(value, str):
        return " ".join(_plain(value).split())
    if not isinstance(value, dict):
        return ""
    said = ((name, _field(inner)) for name, inner in value.items())
    return "; ".join(text if name in {"text", "note"} else f"{name} {text}" for name, text in said if text)


def _address(address: Any) -> tuple[str, str]:
    return f"State of the Union address of {address['year']} by {address['name']}", address["text"]


def _service(service: Any) -> tuple[str, str]:
    """A web service's name, its description, and a line `operation: what it does` for each of its operations."""
    parts = [_plain(service.get("documentation", ""))]
    parts += [
        f"{name}: {_plain(operation['documentation'])}"
        for name, operation in service["operations"].items()
        if "documentation" in operation
    ]
    return service["metadata"]["serviceFullName"], "\n\n".join(parts)


def _chapter(chapter: Any) -> tuple[str, str]:
    return f"Moby Dick, chapter {chapter['chapter']}: {chapter['title'].rstrip('.')}", chapter["text"]


_READERS: dict[str, Callable[[Any], tuple[str, str]]] = {
    "factbook": _factbook,
    "sotu": _address,
    "services": _service,
    "moby-dick": _chapter,
}
