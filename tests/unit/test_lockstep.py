"""Benchmarks that race engines: both end together, and what is counted is what was emitted."""

from __future__ import annotations

import pytest

from benchmarks.lockstep import make_bench, promises_hold, race
from benchmarks.width import judge
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.step_cost import FREE
from ragspec.settings import load_settings
from tests import tiny
from tests.unit.decoding import drafters


def test_each_row_is_held_against_what_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"suite": "rag", "batch": batch, "ratio": ratio} for batch, ratio in ((1, 1.81), (8, 1.2), (32, 0.99))]

    assert not promises_hold(rows, {1: 1.8, 8: 1.3}, 0.98)
    assert promises_hold(rows[::2], {1: 1.8, 8: 1.3}, 0.98)
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in said] == ["holds", "missed", "holds", "holds", "holds"]
    assert said[1] == "rag at batch 8: 1.200, at least 1.30 wanted: missed"


def test_engines_race_side_by_side_and_their_tokens_are_counted() -> None:
    target = tiny.target()
    requests = [Request(str(i), (1, 2, 3 + i), Sampling(max_tokens=24), group="g") for i in range(12)]
    answers = {request.id: tiny.generate(target, request) for request in requests}
    settings = load_settings(prefix_cache=0.0)
    oracle = drafters.NoisyOracle(answers, target.vocabulary)
    benches = {
        name: make_bench(target, settings, 4, panel, FREE) for name, panel in (("plain", []), ("drafts", [oracle]))
    }

    runs = race(benches, requests, 2)

    for name, of in runs.items():
        assert len(of) == 2
        for run in of:
            assert {done.request_id: done.acceptance.token_ids for done in run.done} == answers
            assert 0 < run.tokens <= sum(map(len, answers.values()))
            assert (run.tokens == run.steps) == (name == "plain"), (
                "a sequence emits a token a step, or more with drafts"
            )
            assert 0 < run.inside_s < run.seconds
    row = judge(runs)
    assert row["acceptance_length"] > 1.5
    assert row["drafted_per_step"] > 0
