"""Reads one document's text and title out of its file, by well-kept parsers for what is not plain text."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from ragspec.errors import InputError

if TYPE_CHECKING:
    from bs4 import BeautifulSoup
    from docx.table import Table
    from docx.text.paragraph import Paragraph

#: Bytes that are looked through for a NUL, which no text has.
_SNIFFED = 8192
#: HTML elements parted from their neighbours by an empty line, begun on a line of their own, parted by a space.
_PARTED_BY = {
    "\n\n": (
        *("address", "article", "aside", "blockquote", "div", "dl", "figure", "footer", "form", "header", "hr", "main"),
        *("nav", "ol", "p", "pre", "section", "table", "ul", "h1", "h2", "h3", "h4", "h5", "h6"),
    ),
    "\n": ("dd", "dt", "figcaption", "li", "tr"),
    " ": ("td", "th"),
}
_MARKDOWN_TITLE = re.compile(r"^#{1,6} +(.+?)[ #]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Document:
    """A document's text.

    Attributes:
        text: headings are marked as in Markdown, paragraphs parted by empty lines.
        title: as the file itself says, or empty.
    """

    text: str
    title: str


def parse_document(content: bytes, suffix: str) -> Document:
    """The text of a file.

    Args:
        content: the file's bytes.
        suffix: the end of its name, lower case, with the dot.

    Raises:
        InputError: codes `empty_file`, `binary_file`, `not_utf8`, `missing_extra`, `no_text`, `unreadable_file`.
    """
    if not content.strip():
        raise InputError("It is empty.", code="empty_file")
    parsers: dict[str, Callable[[bytes], Document]] = {
        ".pdf": _parse_pdf,
        ".docx": _parse_docx,
        ".html": _parse_html,
        ".htm": _parse_html,
        ".md": _parse_markdown,
    }
    try:
        document = parsers.get(suffix, _parse_text)(content)
    except ImportError as error:
        raise InputError(
            f"Reading {suffix} needs {error.name}.", "Install `ragspec[documents]`.", code="missing_extra"
        ) from error
    if not document.text.strip():
        raise InputError("It holds no text (a scan, perhaps).", code="no_text")
    return document


def decode_utf8(content: bytes) -> str:
    """Text of bytes, byte order mark dropped.

    Raises:
        InputError: codes `binary_file` and `not_utf8`.
    """
    if b"\0" in content[:_SNIFFED]:
        raise InputError("It is binary, not text.", code="binary_file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"It is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}.",
            "`iconv -t UTF-8` converts it.",
            code="not_utf8",
        ) from None


def _parse_text(content: bytes) -> Document:
    return Document(decode_utf8(content), "")


def _parse_markdown(content: bytes) -> Document:
    text = decode_utf8(content)
    title = _MARKDOWN_TITLE.search(text)
    return Document(text, title.group(1) if title else "")


def _parse_html(content: bytes) -> Document:
    from bs4 import BeautifulSoup, UnusualUsageWarning

    if b"\0" in content[:_SNIFFED] and not content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError("It is binary, not text.", code="binary_file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusualUsageWarning)  # XHTML, or a file that holds nothing but a path
        soup = BeautifulSoup(content, "lxml")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    return Document(_html_text(soup), title)


def _html_text(soup: BeautifulSoup) -> str:
    from bs4.element import PreformattedString

    for hidden in soup(["script", "style", "noscript", "template", "head"]):
        hidden.decompose()
    for node in soup.find_all(string=True):
        if isinstance(node, PreformattedString):  # a comment, doctype or processing instruction
            node.extract()
        elif not node.find_parent("pre"):
            node.replace_with(re.sub(r"\s+", " ", node))
    for line_break in soup("br"):
        line_break.replace_with("\n")
    for parting, names in _PARTED_BY.items():
        for block in soup(names):
            level = re.fullmatch(r"h([1-6])", block.name)
            block.insert(0, parting + ("#" * int(level.group(1)) + " " if level else ""))
            if parting != "\n":
                block.append(parting)
    lines = (line.rstrip() for line in soup.get_text().split("\n"))
    text = "\n".join(line.removeprefix(" ") if line[:2] != "  " else line for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _parse_pdf(content: bytes) -> Document:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it comments on every flaw that it can read over
    try:
        reader = PdfReader(BytesIO(content))
        text = "\n\n".join(page.extract_text() for page in reader.pages)
        title = (reader.metadata.title if reader.metadata else None) or ""
    except Exception as error:  # a damaged file makes the parser raise nearly anything
        raise InputError(f"The PDF cannot be read: {error or type(error).__name__}.", code="unreadable_file") from error
    # Lone surrogates come out of broken fonts; no store takes them.
    return Document(text.encode("utf-8", "replace").decode(), str(title).encode("utf-8", "replace").decode())


def _parse_docx(content: bytes) -> Document:
    import docx

    try:
        document = docx.Document(BytesIO(content))
        text = "\n\n".join(filter(str.strip, map(_docx_block, document.iter_inner_content())))
        return Document(text, document.core_properties.title or "")
    except Exception as error:  # a damaged file makes the parser raise nearly anything
        raise InputError(
            f"The document cannot be read: {error or type(error).__name__}.", code="unreadable_file"
        ) from error


def _docx_block(block: Paragraph | Table) -> str:
    from docx.table import Table

    if isinstance(block, Table):
        return "\n".join(" | ".join(cell.text for cell in row.cells) for row in block.rows)
    level = re.fullmatch(r"Heading ([1-6])", (block.style.name if block.style else None) or "")
    return ("#" * int(level.group(1)) + " " if level else "") + block.text
