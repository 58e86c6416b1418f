"""The harness of `benchmarks.peers`, over a stand-in that speaks its protocol from a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import environments
from benchmarks.peers.peer import PEERS, Peer, choose
from benchmarks.peers.process import PeerError
from benchmarks.peers.protocol import Answers, Load, Prompt, Ready
from benchmarks.peers.rounds import Measured, Task, alternate
from benchmarks.peers.suites import shared_tokens, specbench_rag, warm_up
from benchmarks.peers.table import as_json, as_markdown, rows_of
from ragspec.errors import InputError
from tests.tiny import tokenizer

END = 9
PROMPTS = (Prompt((1, 2, 3, 4)), Prompt((5, 6, END, 7)))


def task(max_tokens: int = 3) -> Task:
    load = Load("folder", "", threads=2, concurrency=1, window=8, cache_gb=1, end_tokens=(END,))
    return Task(PROMPTS, warm_up=(Prompt((8, 8)),), max_tokens=max_tokens, load=load)


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[..., Peer]:
    def make(name: str, **options: Any) -> Peer:
        return Peer(
            name, "tests.unit.stand_in_peer", "", {"name": name, "journal": str(tmp_path / "journal"), **options}
        )

    return make


def measure(peers: list[Peer], logs: Path, rounds: int = 2, timeout_s: float = 60) -> list[Measured]:
    return alternate(
        task(),
        peers,
        rounds,
        lambda peer: [sys.executable, "-m", peer.module],
        logs,
        timeout_s=timeout_s,
        tell=lambda _: None,
    )


def test_peers_take_turns_and_every_turn_is_a_process_of_its_own(stand_in: Callable[..., Peer], tmp_path: Path) -> None:
    measured = measure([stand_in("a"), stand_in("b")], tmp_path)

    names, pids = zip(*(line.split() for line in (tmp_path / "journal").read_text().splitlines()), strict=True)
    assert names == ("a", "b", "a", "b")
    assert len(set(pids)) == len(pids)
    assert [len(one.runs) for one in measured] == [2, 2]
    assert measured[0].ready == Ready({"stand-in": "1.0"}, "2 threads")


def test_answers_end_before_the_end_token_and_at_the_limit(stand_in: Callable[..., Peer], tmp_path: Path) -> None:
    (one,) = measure([stand_in("a")], tmp_path, rounds=1)

    assert one.runs[0].outputs == ((1, 2, 3), (5, 6))


def test_what_a_peer_prints_goes_to_its_log(stand_in: Callable[..., Peer], tmp_path: Path) -> None:
    measure([stand_in("a")], tmp_path, rounds=1)

    assert "a library says hello" in (tmp_path / "a.log").read_text()


def test_a_peer_that_fails_to_load_says_why_and_the_others_go_on(stand_in: Callable[..., Peer], tmp_path: Path) -> None:
    broken, sound = measure([stand_in("broken", fail="load"), stand_in("sound")], tmp_path)

    assert broken.failure == "RuntimeError: there is no such model"
    assert broken.runs == []
    assert len(sound.runs) == 2


def test_a_peer_that_dies_in_a_later_round_keeps_what_it_had_measured(
    stand_in: Callable[..., Peer], tmp_path: Path
) -> None:
    dying, sound = measure([stand_in("dying", fail="run", after=1), stand_in("sound")], tmp_path, rounds=3)

    assert len(dying.runs) == 1
    assert dying.failure
    assert len(sound.runs) == 3
    assert (tmp_path / "journal").read_text().count("dying") == 2  # it is not tried a third time


def test_a_peer_that_hangs_is_ended(stand_in: Callable[..., Peer], tmp_path: Path) -> None:
    (one,) = measure([stand_in("a", fail="hang")], tmp_path, rounds=1, timeout_s=2)

    assert one.failure == "no answer within 2 s"


def test_a_peer_that_reads_other_tokens_than_it_was_given_is_refused(
    stand_in: Callable[..., Peer], tmp_path: Path
) -> None:
    (one,) = measure([stand_in("a", fail="miscount")], tmp_path, rounds=1)

    assert one.failure == "it counts 5 tokens in prompt 1, which has 4"


def test_a_peer_without_environment_or_model_file_is_a_row_that_says_so(
    stand_in: Callable[..., Peer], tmp_path: Path
) -> None:
    with pytest.raises(PeerError, match=r"not installed: .*/vllm/bin/python is not there"):
        environments.command(next(peer for peer in PEERS if peer.name == "vllm"), tmp_path)

    (one,) = measure([Peer("gguf", "none", "", gguf=True)], tmp_path, rounds=1)
    (row,) = rows_of([one], 8)
    assert row.questions_per_s is None
    assert "--gguf" in row.failure
    assert "| gguf | failed: it reads GGUF" in as_markdown({}, [row])


def test_the_table_has_medians_ratios_cache_share_and_agreement() -> None:
    ours, theirs = Measured(Peer("ragspec", "", "")), Measured(Peer("other", "", ""))
    ours.runs = [Answers(((1, 2), (3, 4)), seconds) for seconds in (2.0, 1.0, 4.0)]
    theirs.runs = [Answers(((1, 2), (3, 5)), seconds, cached_tokens=30) for seconds in (6.0, 5.0, 7.0)]
    theirs.ready = Ready({"other": "1.2"}, "bfloat16")

    mine, other = rows = rows_of([ours, theirs], prompt_tokens=40)

    assert (mine.questions_per_s, mine.slowest, mine.fastest, mine.cached) == (1.0, 0.5, 2.0, None)
    assert (other.ratio, other.tokens_per_s, other.cached, other.agreement) == (3.0, 4 / 6, 0.75, 0.5)
    page = as_markdown({"date": "today"}, rows)
    assert "- date: today" in page
    assert "| other | 0.333 | 0.286 to 0.400 | 4 | 0.7 | 3.00x | 75.0% | 50% | bfloat16 | other 1.2 |" in page
    assert json.loads(as_json({}, rows, [ours, theirs]))["seconds"] == {
        "ragspec": [2.0, 1.0, 4.0],
        "other": [6.0, 5.0, 7.0],
    }


def test_peers_are_chosen_by_name_or_by_what_they_are_meant_for() -> None:
    assert "transformers-lookup" in {peer.name for peer in choose([], 1)}
    assert "transformers-lookup" not in {peer.name for peer in choose([], 16)}
    assert [peer.name for peer in choose(["vllm", "ragspec"], 16)] == ["vllm", "ragspec"]
    with pytest.raises(InputError, match="no peer 'vlm'"):
        choose(["vlm"], 1)


def test_shared_tokens_are_those_of_the_longest_beginnings_seen_before() -> None:
    prompts = [Prompt((1, 2, 3)), Prompt((7,)), Prompt((1, 2, 4, 5)), Prompt((1, 2, 4, 6)), Prompt((1, 2, 3))]

    assert shared_tokens(prompts) == 2 + 3 + 3


def test_prompts_of_a_file_are_rendered_once_as_a_user_s_messages(tmp_path: Path) -> None:
    chat = deepcopy(tokenizer())
    chat.chat_template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}>"
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "why?"}\n{"prompt": "how come, and since when?"}\n')

    prompts = specbench_rag(chat, 20, file, max_tokens=4)

    assert [chat.decode(list(prompt.tokens)) for prompt in prompts] == ["[user]why?>"]  # the other does not fit
    file.write_text('{"question": "why?"}\n')
    with pytest.raises(InputError, match=r"Row 1 of .* has no text in `prompt`"):
        specbench_rag(chat, 20, file, max_tokens=4)


def test_the_warm_up_shares_no_beginning_with_the_suite() -> None:
    letters = tokenizer()
    prompts = [Prompt(tuple(letters(text)["input_ids"])) for text in ("one two three", "one two four")]

    warm = warm_up(letters, prompts, count=2)

    assert [letters.decode(list(prompt.tokens)) for prompt in warm] == ["three two one", "four two one"]
