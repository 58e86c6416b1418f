"""What the verbs print, without any service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ragspec.cli import cli
from ragspec.cli.answer import print_answer
from ragspec.cli.corpus import _print_report
from ragspec.corpus.ingest import IngestReport
from ragspec.decoding.acceptance import Source
from ragspec.jobs.answer import Answer


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


def test_a_misspelt_setting_is_warned_of_once_on_standard_error_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGSPEC_HOME", str(tmp_path))
    monkeypatch.setenv("RAGSPEC_STALE_AFTR", "30")

    done = CliRunner().invoke(cli, ["config", "--json"])

    assert done.exit_code == 0
    assert json.loads(done.stdout)["RAGSPEC_STALE_AFTER"]["value"] == 20
    assert done.stderr == (
        "warning[unknown_setting]: There is no setting RAGSPEC_STALE_AFTR; it is passed over. "
        "Did you mean RAGSPEC_STALE_AFTER?\n"
    )


def test_an_answer_in_a_pipe_has_a_step_a_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"word{number}" for number in range(50)]
    answer = Answer(
        idx=0,
        status="completed",
        text=" ".join(words),
        token_ids=list(range(50)),
        token_sources=[int(Source.TARGET), *[int(Source.PASSAGE)] * 48, int(Source.TARGET)],
        per_step_drafted=[48],
        per_step_accepted=[48],
    )

    print_answer("q0", "Which words?", answer, words)

    lines = capsys.readouterr().out.splitlines()
    drafted = " ".join(f"'{word}':passage" for word in words[1:49])
    assert lines[-3:] == [
        "step  drafted  accepted  tokens",
        "0                        'word0':target",
        f"1     48       48        {drafted} 'word49':target",
    ]
