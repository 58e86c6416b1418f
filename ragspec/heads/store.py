"""A folder of recorded answers: what heads are trained and measured on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ragspec.errors import InputError

#: Tokens of a file; at 576 numbers a state it takes some 75 MB.
SHARD_TOKENS = 65536
#: One thing of so many that answers are about is held back.
HELD_BACK = 40
_CARD = "data.json"
#: Where a file keeps which prompts it answers, and their answers' texts.
_ANSWERED = "answered"


@dataclass(frozen=True, slots=True)
class DataCard:
    """Where recorded answers come from.

    Attributes:
        target: identity of the target that wrote them.
        hidden: width of its states.
        source: in words.
        seed: of everything random.
    """

    target: str
    hidden: int
    source: str
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Many answers, one after another.

    Attributes:
        tokens: [n].
        hidden: [n, hidden]; row i gave token i.
        starts: where each answer begins, and at last n, [answers + 1].
        held_back: whether each is measured on and never trained on, [answers].
        kinds: what kind of prompt each answers.
        prompts: their tokens, one prompt after another; none where they were not recorded.
        prompt_starts: where each prompt begins, and at last where they end, [answers + 1].
    """

    tokens: Tensor
    hidden: Tensor
    starts: Tensor
    held_back: Tensor
    kinds: tuple[str, ...]
    prompts: Tensor
    prompt_starts: Tensor

    def __len__(self) -> int:
        """Answers."""
        return len(self.starts) - 1

    def prompt(self, number: int) -> Tensor:
        """The prompt of an answer, [n]."""
        start, end = self.prompt_starts[number : number + 2].tolist()
        return self.prompts[start:end]


class AnswerWriter:
    """Writes answers into a folder, a file at a time; what a killed run left is whole files. A context manager.

    Args:
        folder: made if it is missing; files that lie there are kept, and what they answer is known (`text_of`).
        card: written at once.

    Raises:
        InputError: the folder holds answers of another target (code `other_target`).
    """

    def __init__(self, folder: Path, card: DataCard) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _CARD
        if path.exists():
            there = read_card(folder)
            if there.target != card.target:
                msg = f"{folder} holds answers of {there.target}; these are of {card.target}."
                raise InputError(msg, "Choose another folder.", code="other_target")
        path.write_text(json.dumps(asdict(card), indent=1) + "\n", encoding="utf-8")
        self._folder = folder
        self._tokens: list[int] = []
        self._hidden: list[Tensor] = []
        self._starts: list[int] = []
        self._held_back: list[bool] = []
        self._kinds: list[str] = []
        self._answered = _read_answered(folder)
        self._gathered: dict[str, str] = {}
        self._prompts: list[int] = []
        self._prompt_starts: list[int] = []
        self.written = 0

    def __enter__(self) -> Self:
        """Use it in a `with`: whatever ends that, what is gathered is written."""
        return self

    def __exit__(self, *error: object) -> None:
        """Write what is gathered."""
        self.flush()

    def text_of(self, prompt: str) -> str | None:
        """The answer that a prompt has in the folder by now, or None; `prompt` as in `add`."""
        return self._answered.get(prompt)

    def add(
        self,
        kind: str,
        key: str,
        tokens: Sequence[int],
        hidden: Tensor,
        *,
        prompt: str,
        prompt_tokens: Sequence[int],
        text: str,
    ) -> None:
        """One answer.

        Args:
            kind: of its prompt.
            key: what it is about. One key in `HELD_BACK` is held back with all its answers: answers about the same thing are
                alike, and a head that was trained on one is not measured on the other.
            tokens: [n].
            hidden: [n, hidden].
            prompt: what was asked: equal for equal prompts.
            prompt_tokens: [m].
            text: the answer's.
        """
        if len(hidden) != len(tokens):
            msg = f"{len(hidden)} states for {len(tokens)} tokens of an answer about {key!r}"
            raise ValueError(msg)
        self._starts.append(len(self._tokens))
        self._tokens += tokens
        self._hidden.append(hidden.to(torch.bfloat16))
        self._held_back.append(is_held_back(key))
        self._kinds.append(kind)
        self._answered[prompt] = self._gathered[prompt] = text
        self._prompt_starts.append(len(self._prompts))
        self._prompts += prompt_tokens
        self.written += len(tokens)
        if len(self._tokens) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is gathered."""
        if not self._tokens:
            return
        numbers = [int(path.stem.rpartition("-")[2]) for path in self._folder.glob("answers-*.safetensors")]
        path = self._folder / f"answers-{max(numbers, default=-1) + 1:05d}.safetensors"
        tensors = {
            "tokens": torch.tensor(self._tokens, dtype=torch.int32),
            "hidden": torch.cat(self._hidden),
            "starts": torch.tensor([*self._starts, len(self._tokens)]),
            "held_back": torch.tensor(self._held_back),
            "prompts": torch.tensor(self._prompts, dtype=torch.int32),
            "prompt_starts": torch.tensor([*self._prompt_starts, len(self._prompts)]),
        }
        metadata = {"kinds": json.dumps(self._kinds), _ANSWERED: json.dumps(self._gathered)}
        save_file(tensors, path.with_suffix(".part"), metadata=metadata)
        path.with_suffix(".part").replace(path)
        self._tokens, self._hidden, self._starts, self._held_back, self._kinds = [], [], [], [], []
        self._prompts, self._prompt_starts, self._gathered = [], [], {}


def is_held_back(key: str) -> bool:
    """Whether answers about this are measured on and never trained on."""
    return zlib.crc32(key.encode()) % HELD_BACK == 0


def read_card(folder: Path) -> DataCard:
    """The folder's card.

    Raises:
        InputError: it has none.
    """
    try:
        return DataCard(**json.loads((folder / _CARD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        msg = f"{folder} holds no recorded answers: {error}"
        raise InputError(msg, "Make some with `ragspec head data`.", code="no_head_data") from error


def answer_files(folder: Path) -> list[Path]:
    """The folder's files, in the order in which they were written.

    Raises:
        InputError: there is none.
    """
    files = sorted(folder.glob("answers-*.safetensors"))
    if not files:
        msg = f"{folder} holds no recorded answers."
        raise InputError(msg, "Make some with `ragspec head data`.", code="no_head_data")
    return files


def _read_answered(folder: Path) -> dict[str, str]:
    """Prompt -> answer, of all files of a folder."""
    answered: dict[str, str] = {}
    for path in folder.glob("answers-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            answered |= json.loads(file.metadata().get(_ANSWERED, "{}"))  # older files do not say
    return answered


def read_answers(path: Path) -> Answers:
    """One file."""
    with safe_open(path, framework="pt") as file:
        kinds = tuple(json.loads(file.metadata()["kinds"]))
        tokens, hidden, starts, held = (file.get_tensor(name) for name in ("tokens", "hidden", "starts", "held_back"))
        recorded = "prompts" in file.keys()  # noqa: SIM118 - the file is no mapping
        prompts = file.get_tensor("prompts") if recorded else tokens[:0]
        prompt_starts = file.get_tensor("prompt_starts") if recorded else torch.zeros_like(starts)
        return Answers(tokens, hidden, starts, held, kinds, prompts, prompt_starts)
