"""Each format gives its text, and each way a file can be wrong has its code."""

from __future__ import annotations

import io
import sys

import docx
import pytest

from ragspec.corpus.parse import parse_document
from ragspec.errors import InputError

HTML = b"""<html><head><title>Leave &amp; pay</title><style>p {color: red}</style></head><body><h2>Notice</h2>
<!-- draft --><p>Give <b>four</b> weeks'
notice.</p><ul><li>in writing</li><li>signed</li></ul><pre>a
  b</pre><script>alert(1)</script></body></html>"""


def minimal_pdf(text: str) -> bytes:
    """A PDF of one page that shows one line."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        (
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
            b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>"
        ),
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    out = io.BytesIO(b"%PDF-1.4\n")
    out.seek(0, io.SEEK_END)
    places = []
    for number, body in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 5\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places))
    out.write(b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start)
    return out.getvalue()


def test_html_keeps_inline_text_together_and_marks_headings() -> None:
    document = parse_document(HTML, ".html")

    assert document.title == "Leave & pay"
    assert document.text == "## Notice\n\nGive four weeks' notice.\n\nin writing\nsigned\n\na\n  b"


def test_xhtml_is_read_without_a_warning() -> None:
    xhtml = b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body><p>Text.</p></body></html>'

    assert parse_document(xhtml, ".html").text == "Text."


def test_pdf_gives_its_text() -> None:
    assert parse_document(minimal_pdf("Four weeks of notice."), ".pdf").text == "Four weeks of notice."


def test_docx_gives_headings_paragraphs_and_tables_in_order() -> None:
    document = docx.Document()
    document.core_properties.title = "Handbook"
    document.add_heading("Leave", level=2)
    document.add_paragraph("Thirty days.")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "sick", "paid"
    out = io.BytesIO()
    document.save(out)

    parsed = parse_document(out.getvalue(), ".docx")

    assert (parsed.title, parsed.text) == ("Handbook", "## Leave\n\nThirty days.\n\nsick | paid")


def test_markdown_takes_its_first_heading_as_title() -> None:
    assert parse_document(b"\xef\xbb\xbf# Leave\n\nThirty days.", ".md").title == "Leave"


@pytest.mark.parametrize(
    ("content", "suffix", "code"),
    [
        (b" \n", ".txt", "empty_file"),
        (b"\x7fELF\0\0", ".txt", "binary_file"),
        (b"\x89PNG\0\0", ".html", "binary_file"),
        ("Grüße".encode("latin-1"), ".md", "not_utf8"),
        (b"<html><script>x</script></html>", ".html", "no_text"),
        (minimal_pdf(""), ".pdf", "no_text"),
        (b"not a pdf", ".pdf", "unreadable_file"),
        (b"not a docx", ".docx", "unreadable_file"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(content: bytes, suffix: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_document(content, suffix)

    assert code == caught.value.error_code


def test_a_missing_parser_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docx", None)

    with pytest.raises(InputError, match=r"ragspec\[documents\]") as caught:
        parse_document(b"PK", ".docx")

    assert caught.value.error_code == "missing_extra"
