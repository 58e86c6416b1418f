"""The bits of text that a stream gives are together the answer's text, and what each step adds is told once."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ragspec.decoding.engine import Engine
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.stopping import answer_text, holds_stop
from ragspec.decoding.streaming import TextStream
from tests import tiny
from tests.unit.decoding import drafters

#: Characters of one to four bytes, and bytes that are none.
PIECES = [*"ab <|\n", "é", "好", "😀", "\ufffd"]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, without merges: one token a byte, and a text is its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def with_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: ASCII has tokens, everything else is spelt in bytes."""
    vocabulary = {chr(c): c for c in (10, *range(32, 127))} | {f"<0x{byte:02X}>": 200 + byte for byte in range(256)}
    raw = Tokenizer(models.BPE(vocab={**vocabulary, "<unk>": 500}, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


TOKENIZERS = {"byte level": byte_level(), "with fallback": with_fallback(), "letters": tiny.tokenizer()}


def spell(tokenizer: PreTrainedTokenizerBase, rng: random.Random, length: int) -> list[int]:
    """Tokens of random text, some of them lost, so that characters are broken."""
    text = "".join(rng.choices(PIECES, k=length))
    tokens = tokenizer.encode(text)
    return [token for token in tokens if rng.random() > rng.choice([0.0, 0.1])]


def write(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stops: tuple[str, ...], least: int, rng: random.Random
) -> tuple[list[str], str]:
    """Stream tokens as the engine's steps would give them; returns the bits and the whole answer."""
    stream = TextStream(tokenizer, stops)
    bits, start = [], 0
    while start < len(tokens):
        end = min(len(tokens), start + rng.randrange(1, 5))
        over = next((k for k in range(start + 1, end + 1) if holds_stop(tokenizer, tokens[:k], stops, least)), None)
        if over:
            tokens = tokens[:over]
            break
        bits.append(stream.take(tokens[start:end]))
        start = end
    whole = answer_text(tokenizer, tokens, stops, least)
    return [*bits, stream.close(whole)], whole


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(40))
def test_the_bits_are_together_the_answer(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = TOKENIZERS[kind]
    stops = tuple("".join(rng.choices(PIECES, k=rng.randrange(1, 5))) for _ in range(rng.randrange(4)))
    tokens = spell(tokenizer, rng, rng.randrange(1, 120))

    bits, whole = write(tokenizer, tokens, stops, rng.choice([0, 0, 5]), rng)

    assert "".join(bits) == whole


def test_text_comes_as_soon_as_it_is_certain() -> None:
    stream = TextStream(byte_level(), ["ab\n", "b!"])

    given = [stream.take([token]) for token in byte_level().encode("x好aba好")]

    assert given == ["x", "", "", "好", "", "", "ab", "", "", "a好"]


def test_bytes_of_a_fallback_wait_for_the_next_token_that_is_none() -> None:
    """Three bytes of a character and one of another are no text; with two more they are two characters."""
    tokenizer = with_fallback()
    stream = TextStream(tokenizer)

    given = [stream.take([token]) for token in tokenizer.encode("a好好b")]

    assert given == ["a", *[""] * 6, "好好b"]


def test_a_long_answer_is_not_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    lengths = []

    def counting(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return str(tokenizer.decode(tokens))

    monkeypatch.setattr("ragspec.decoding.streaming.decode", counting)
    stream = TextStream(tokenizer, ["stop"])
    for token in tokenizer.encode("aé好 " * 300):
        stream.take([token])

    assert max(lengths) < 30


@pytest.mark.parametrize("drafting", [False, True])
def test_each_step_tells_what_it_added_to_whom_it_was_asked_for(drafting: bool) -> None:
    target = tiny.target()
    requests = [
        Request(name, tuple(range(number + 1, number + 20)), Sampling(max_tokens=17), stream=name != "silent")
        for number, name in enumerate(["one", "silent", "two", "three"])
    ]
    answers = {request.id: tiny.generate(target, request) for request in requests}
    panel = [drafters.NoisyOracle(answers, target.vocabulary)] if drafting else []
    engine = Engine(target, max_batch=2, prefill_chunk=7, drafters=panel)
    for request in requests:
        engine.add(request)
    told: dict[str, list[int]] = {}
    sources: dict[str, list[int]] = {}
    done = {}
    longest = 0
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
        for fresh in engine.fresh:
            assert fresh.start == len(told.setdefault(fresh.request_id, []))
            told[fresh.request_id] += fresh.tokens
            sources.setdefault(fresh.request_id, []).extend(fresh.sources)
            longest = max(longest, len(fresh.tokens))

    assert told == {name: list(answer) for name, answer in answers.items() if name != "silent"}
    assert all(tuple(of) == done[name].acceptance.token_sources for name, of in sources.items())
    assert (longest > 1) is drafting
