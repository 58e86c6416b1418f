"""What the verbs print, without any service."""

from __future__ import annotations

import pytest

from ragspec.cli.corpus import _print_report
from ragspec.corpus.ingest import IngestReport


@pytest.mark.parametrize(
    ("report", "first", "second"),
    [
        (
            IngestReport(added=1, written=1, failed=1, unknown=1),
            "docs: 1 document added, 0 replaced, 0 unchanged, 0 removed; 1 passage written; 1 failure.",
            "1 file of another format was passed over.",
        ),
        (
            IngestReport(added=2, written=3, unknown=2),
            "docs: 2 documents added, 0 replaced, 0 unchanged, 0 removed; 3 passages written; 0 failures.",
            "2 files of other formats were passed over.",
        ),
    ],
)
def test_a_report_counts_in_english(
    report: IngestReport, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _print_report(report, "docs", as_json=False)

    assert capsys.readouterr().out.splitlines() == [first, second]
