"""Token texts come from the target's tokenizer file alone, and only from the target that answered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ragspec.cli.tokens import token_texts
from ragspec.jobs.answer import Answer
from ragspec.models import model_identity
from ragspec.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A model folder whose tokenizer writes each byte as a token; its name looks like one with a precision behind it."""
    folder = tmp_path / "tiny+chat"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return Settings(model=str(folder), home=tmp_path / "home")


def answer(settings: Settings, text: str, precision: str = "+float32") -> Answer:
    tokens = Tokenizer.from_file(str(Path(settings.model) / "tokenizer.json")).encode(text).ids
    return Answer(
        idx=0,
        status="completed",
        model=model_identity(settings.model, Path(settings.model)) + precision,
        token_ids=tokens,
    )


def test_texts_of_tokens_put_together_are_the_answer(settings: Settings) -> None:
    """Also where a character spans several tokens: its last one shows it."""
    text = "Zürich 🦀 naïve, longer than the context of one token"

    texts = token_texts(settings, answer(settings, text))

    assert texts is not None
    assert "".join(texts) == text
    assert len(texts) == len(text.encode())


@pytest.mark.parametrize("precision", ["", "+float32", "+int8"])
def test_an_answer_has_texts_whatever_precision_it_names(settings: Settings, precision: str) -> None:
    """Answers of before there were several name none."""
    assert token_texts(settings, answer(settings, "hi", precision)) == ["h", "i"]


def test_another_models_answer_has_no_texts(settings: Settings) -> None:
    other = Answer(idx=0, status="completed", model="other@0123456789abcdef", token_ids=[1])
    changed = Answer(idx=0, status="completed", model="tiny+chat@0123456789abcdef+float32", token_ids=[1])

    assert token_texts(settings, other) is None
    assert token_texts(settings, changed) is None
    assert token_texts(settings.model_copy(update={"model": str(settings.home / "nowhere")}), other) is None


def test_the_queue_verbs_import_no_torch_and_their_help_no_database() -> None:
    code = (
        "import sys, ragspec.cli.jobs, ragspec.cli.results\n"
        "assert not {'sqlalchemy', 'celery', 'chromadb', 'pyarrow'} & set(sys.modules)\n"
        "import producer.submit, ragspec.jobs.export, ragspec.jobs.claims, ragspec.cli.tokens, ragspec.cli.answer\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


def test_an_error_is_one_line_with_its_code_and_exit_status(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ragspec", "submit", "nowhere.jsonl", "--collection", "handbook"]
    root = str(Path(__file__).parents[2])
    addresses = {"RAGSPEC_DATABASE_URL": "postgresql://127.0.0.1:1/x", "RAGSPEC_REDIS_URL": "redis://127.0.0.1:1/0"}

    done = subprocess.run(
        command, check=False, cwd=tmp_path, env={"PYTHONPATH": root, **addresses}, capture_output=True, text=True
    )

    assert done.returncode == 66
    assert done.stderr == "error[unknown_file]: There is no file nowhere.jsonl.\n"
