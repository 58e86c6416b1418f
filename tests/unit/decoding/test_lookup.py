"""The lookup drafters copy from the request's own text and from the answers of its job, and from no other job's."""

from __future__ import annotations

import random

from ragspec.decoding.acceptance import Source
from ragspec.decoding.draft import Draft
from ragspec.decoding.engine import Engine
from ragspec.decoding.job_answers import ANSWER_START, JobAnswers
from ragspec.decoding.lookup import JobDrafter, OwnTextDrafter
from ragspec.decoding.lookup_evidence import evidence
from ragspec.decoding.matching import LONGEST_MATCH, Match
from ragspec.decoding.request import Request, Sampling
from tests import tiny


def propose(prompt: list[int], emitted: list[int], limit: int = 10, spans: tuple[tuple[int, int], ...] = ()) -> Draft:
    drafter = OwnTextDrafter()
    drafter.begin(Request("r", tuple(prompt), passage_spans=spans))
    drafter.observe("r", emitted, None)
    return dict(drafter.propose({"r": limit}))["r"]


def answer(drafter: JobDrafter, group: str | None, tokens: list[int], name: str = "earlier") -> None:
    """A whole request."""
    drafter.begin(Request(name, (1,), group=group))
    drafter.observe(name, tokens, None)
    drafter.end(name)


def propose_in_job(drafter: JobDrafter, group: str | None, emitted: list[int], limit: int = 10) -> Draft | None:
    drafter.begin(Request("r", (1,), group=group))
    drafter.observe("r", emitted, None)
    draft = dict(drafter.propose({"r": limit})).get("r")
    drafter.end("r")
    return draft


def test_the_longer_match_wins_over_the_more_recent() -> None:
    draft = propose([1, 2, 3, 50, 51, 52, 53, 3, 60, 61], [1, 2, 3])

    assert draft.tokens[:3] == (50, 51, 52)


def test_of_equal_matches_the_most_frequent_continuation_wins_and_of_these_the_most_recent() -> None:
    assert propose([7, 8, 100, 9, 7, 8, 200, 9], [7, 8]).tokens[0] == 200
    assert propose([7, 8, 100, 9, 7, 8, 100, 6, 7, 8, 200, 5], [7, 8]).tokens[0] == 100


def test_a_draft_is_as_long_as_its_limit_and_its_text_allow() -> None:
    text = list(range(100, 140))

    assert propose(text, [105], limit=7).tokens == tuple(range(106, 113))
    assert len(propose(text, [105], limit=7).evidence) == 7


def test_a_text_that_repeats_itself_is_repeated() -> None:
    """A copy that reaches the end of the text goes on with what it copied."""
    draft = propose([1, 2, 50, 51, 52, 50, 51], [52, 50], limit=8)

    assert draft.tokens == (51, 52, 50, 51, 52, 50, 51, 52)
    assert draft.sources[:4] == (Source.PROMPT, Source.ANSWER, Source.ANSWER, Source.PROMPT)
    assert len(draft.sources) == len(draft.evidence) == 8


def test_a_text_that_comes_in_pieces_is_drafted_from_as_one_that_comes_at_once() -> None:
    """Whether drafts were asked for in between or not."""
    rng = random.Random(3)
    for _ in range(50):
        prompt, answer = ([rng.randrange(6) for _ in range(30)] for _ in range(2))
        drafts = []
        for often in (True, False):
            drafter = OwnTextDrafter()
            drafter.begin(Request("r", tuple(prompt)))
            for token in answer:
                drafter.observe("r", [token], None)
                if often:
                    drafter.propose({"r": 5})
            drafts.append(drafter.propose({"r": 5})["r"])
        assert drafts[0] == drafts[1]
        assert drafts[0].tokens


def test_what_is_copied_behind_anothers_draft_is_what_would_be_copied_if_it_had_been_emitted() -> None:
    """Unless the match lies in that draft itself, which nobody has indexed."""
    rng = random.Random(4)
    matched = 0
    for _ in range(500):
        prompt, emitted = ([rng.randrange(12) for _ in range(rng.randrange(1, size))] for size in (60, 10))
        ahead = [rng.randrange(12) for _ in range(rng.randrange(1, 7))]
        if ahead[-1] in (emitted[-1], *ahead[:-1]):
            continue
        drafter = OwnTextDrafter()
        drafter.begin(Request("r", tuple(prompt), passage_spans=((0, len(prompt) // 2),)))
        drafter.observe("r", emitted, None)
        limit = rng.randrange(1, 12)

        draft = drafter.extend("r", ahead, limit)

        assert draft == propose(prompt, emitted + ahead, limit, ((0, len(prompt) // 2),))
        matched += bool(draft.tokens)
    assert matched > 100


def test_sources_tell_passage_prompt_and_answer_apart() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    from_passage = propose(prompt, [1, 2], spans=((0, 4),))
    from_answer = propose(prompt, [90, 91, 92, 90, 91])

    assert from_passage.tokens[:3] == (3, 4, 5)
    assert from_passage.sources[:3] == (Source.PASSAGE, Source.PASSAGE, Source.PROMPT)
    assert from_answer.tokens[0] == 92
    assert from_answer.sources[0] is Source.ANSWER


def test_nothing_seen_before_gives_no_draft() -> None:
    assert propose([1, 2, 3], [4]) == Draft()


def test_a_longer_match_is_stronger_evidence() -> None:
    text = list(range(100, 140))
    short, long = propose(text, [105]), propose(text, list(range(100, 112)))

    assert short.evidence[0].prior < long.evidence[0].prior
    assert short.evidence[0].prior < short.evidence[5].prior, "tokens that follow accepted ones are likelier"


def test_every_token_of_a_draft_of_any_length_has_evidence() -> None:
    for length in (1, 5, LONGEST_MATCH):
        for count in (0, 1, 2, 10, 200):
            assert len(evidence("own", Match(length, (0,)), 1, count)) == count


def test_a_finished_request_is_forgotten() -> None:
    drafter = OwnTextDrafter()
    drafter.begin(Request("r", (1, 2, 3)))
    drafter.end("r")
    drafter.end("r")

    assert not drafter._texts


def test_an_earlier_answer_of_the_job_is_copied_from() -> None:
    """Up to its end and not into the next; where an answer begins is matched too."""
    drafter = JobDrafter()
    answer(drafter, "job", [10, 11, 12, 13])
    answer(drafter, "job", [20, 21])

    copied = propose_in_job(drafter, "job", [10, 11])
    begun = propose_in_job(drafter, "job", [20])

    assert copied is not None
    assert copied.tokens == (12, 13)
    assert set(copied.sources) == {Source.JOB}
    assert begun is not None
    assert begun.evidence[0].kind[-1] == 2


def test_the_engine_gives_a_job_its_answers_to_their_last_token() -> None:
    """With drafts a last step may emit several tokens."""
    answers = JobAnswers()
    engine = Engine(tiny.target(), max_batch=1, drafters=[OwnTextDrafter(), JobDrafter(answers)])
    expected: list[int] = []
    for number in range(3):
        engine.add(Request(str(number), tuple(range(10, 40)), Sampling(max_tokens=12), group="job"))
        expected.append(ANSWER_START)
        while engine.has_work:
            expected += [token for done in engine.step() for token in done.acceptance.token_ids]

    index = answers.index("job")

    assert index.read(0, len(index)) == expected


def test_answers_of_one_job_never_feed_another_job() -> None:
    drafter = JobDrafter()
    answer(drafter, "job", [10, 11, 12, 13])

    assert propose_in_job(drafter, "another", [10, 11]) == Draft()
    assert propose_in_job(drafter, None, [10, 11]) is None


def test_a_job_without_requests_is_kept_until_others_have_come_and_gone() -> None:
    """Between two requests of a job there may be none for a moment."""
    drafter = JobDrafter(JobAnswers(idle_groups=2))
    answer(drafter, "job", [10, 11, 12])
    answer(drafter, "second", [1])
    assert propose_in_job(drafter, "job", [10, 11]) != Draft()

    answer(drafter, "third", [1])
    answer(drafter, "fourth", [1])

    assert propose_in_job(drafter, "job", [10, 11]) == Draft()
    assert len(drafter._answers._groups) <= 2


def test_a_job_keeps_its_newest_answers_and_those_that_were_copied_from() -> None:
    drafter = JobDrafter(JobAnswers(group_tokens=60))
    useful = [500, 501, 502, 503]
    answer(drafter, "job", useful)
    for number in range(30):
        answer(drafter, "job", [1000 + 10 * number + i for i in range(5)])
        kept = propose_in_job(drafter, "job", [500, 501])
        assert kept is not None
        assert kept.tokens == (502, 503)

    assert propose_in_job(drafter, "job", [1000, 1001]) == Draft(), "old and never used"
    newest = propose_in_job(drafter, "job", [1290, 1291])
    assert newest is not None
    assert newest.tokens == (1292, 1293, 1294)
    assert len(drafter._answers.index("job")) <= 60


def test_an_answer_longer_than_the_budget_is_kept_alone() -> None:
    answers = JobAnswers(group_tokens=10)
    answers.join("job")
    answers.add("job", [ANSWER_START, *range(5)])
    answers.add("job", [ANSWER_START, *range(100, 150)])

    assert len(answers.index("job")) == 51


def test_requests_that_are_ended_before_they_began_are_ignored() -> None:
    drafter = JobDrafter()
    drafter.end("never began")

    assert not drafter._written
