"""The stages of the shipped head: fetch, plan, topics, passages, train, eval."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ragspec.decoding.loading import load_configured
from ragspec.decoding.profiling import profile_steps
from ragspec.decoding.request import Request
from ragspec.decoding.target import Target
from ragspec.heads.checkpoint import load_head, save_head
from ragspec.heads.data import write_answers, write_topic_answers
from ragspec.heads.evaluation import compare
from ragspec.heads.loading import make_chain
from ragspec.heads.recipe.documents import read_folder, read_source
from ragspec.heads.recipe.exclusion import read_exclusion
from ragspec.heads.recipe.plan import Corpus, allowed_topics, plan, read_plan, requests, write_plan
from ragspec.heads.recipe.sources import ASKS, RECALLS, SOURCES, fetch
from ragspec.heads.recipe.stages import Stages
from ragspec.heads.report import write_report
from ragspec.heads.store import answer_files, is_held_back, read_answers
from ragspec.heads.texts import PromptName
from ragspec.heads.training import Progress, Recipe, train
from ragspec.models.manifest import sha256_of
from ragspec.prompt import PromptBuilder
from ragspec.settings import load_settings

#: How long the whole takes by default, and the tokens that two cores record and train on in an hour of it.
HOURS, TOKENS_AN_HOUR = 3.0, 450_000
#: Of the tokens, the share about built-in topics.
_TOPIC_SHARE = 0.25
#: Tokens that the default target writes about a topic, in its text and three answers, and in answer to a prompt.
_TOPIC_TOKENS, _ANSWER_TOKENS = 461, 90
#: How the head is trained: one run on all that was recorded. Every epoch is run; the best is kept.
_RECIPE = Recipe(inner=2048, draft_tokens=8192, depth=4, epochs=4, batch=512, learning_rate=1e-3, patience=4)
#: Prompts of a kind that are decoded to measure the head.
_MEASURED = 10


@dataclass(frozen=True, slots=True)
class Options:
    """What the head depends on.

    Attributes:
        hours: of two cores, about.
        exclude: files whose text must not be trained on.
        texts: a folder of texts to use instead of the fetched ones; None for those.
        seed: of everything random.
    """

    hours: float = HOURS
    exclude: tuple[Path, ...] = ()
    texts: Path | None = None
    seed: int = 0


class Teller(Protocol):
    """Says how far a stage is."""

    def recorded(self, kind: str, answers: int, tokens: int) -> None:
        """An answer of a kind was written: so many answers of it by now, so many tokens in all."""

    def trained(self, progress: Progress) -> None:
        """The training run spoke."""


class Making:
    """One folder's way from texts to a head.

    Args:
        folder: for everything; made if it is missing.
        options: of the whole.

    Raises:
        InputError: the folder was begun with other options, or a file to be excluded cannot be read.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        self._options = options
        self._settings = load_settings()
        self._excluded = read_exclusion(options.exclude)
        self._fetched, self._plan, self._data = folder / "texts", folder / "prompts.jsonl", folder / "data"
        self.head = folder / "head"
        texts = SOURCES if options.texts is None else ()
        self.record = Stages(
            folder,
            {
                "target": self._settings.model,
                "budget": options.hours,
                "seed": options.seed,
                "exclusion": [sha256_of(path) for path in options.exclude],
                "folder of texts": None if options.texts is None else str(options.texts.absolute()),
                "set of texts": {source.name: source.sha256 for source in texts},
            },
        )
        self._tokens = options.hours * TOKENS_AN_HOUR

    @property
    def stages(self) -> Mapping[str, Callable[[Teller], Mapping[str, Any]]]:
        """Name -> what is to be done, in order."""
        return {
            "fetch": self._fetch,
            "plan": self._make_plan,
            "topics": self._answer_topics,
            "passages": self._answer_passages,
            "train": self._train,
            "eval": self._evaluate,
        }

    def _fetch(self, _: Teller) -> Mapping[str, Any]:
        if self._options.texts is not None:
            return {"archives": 0}
        paths = [fetch(source, self._fetched) for source in SOURCES]
        return {"archives": len(paths), "bytes": sum(path.stat().st_size for path in paths)}

    def _make_plan(self, _: Teller) -> Mapping[str, Any]:
        if self._options.texts is not None:
            corpora = [Corpus(read_folder(self._options.texts), 1, ASKS, RECALLS)]
        else:
            corpora = [
                Corpus(read_source(source, self._fetched / source.archive), source.share, source.asks, source.recalls)
                for source in SOURCES
            ]
        passages = [text for corpus in corpora for document in corpus.documents for text in document.passages]
        count = round(self._tokens * (1 - _TOPIC_SHARE) / _ANSWER_TOKENS)
        prompts = plan(corpora, count, self._excluded, self._options.seed)
        write_plan(prompts, self._plan)
        return {
            "passages": len(passages),
            "passages left out": sum(text in self._excluded for text in passages),
            "prompts": len(prompts),
        }

    def _answer_topics(self, teller: Teller) -> Mapping[str, Any]:
        write_topic_answers(
            self._target,
            self._data,
            topics=max(1, round(self._tokens * _TOPIC_SHARE / _TOPIC_TOKENS)),
            among=allowed_topics(self._excluded),
            seed=self._options.seed,
            window=self._window,
            progress=teller.recorded,
        )
        return {"tokens in all": self._recorded()}

    def _answer_passages(self, teller: Teller) -> Mapping[str, Any]:
        write_answers(
            self._target,
            self._data,
            self._requests(),
            source=f"the target's own texts and answers about built-in topics; its answers over {self._origin()}",
            window=self._window,
            seed=self._options.seed,
            progress=teller.recorded,
        )
        return {"tokens in all": self._recorded()}

    def _train(self, teller: Teller) -> Mapping[str, Any]:
        recipe = replace(_RECIPE, seed=self._options.seed)
        found = train(self._target, self._data, self.head, recipe, progress=teller.trained)
        return {"mean acceptance length": round(found.mean_acceptance_length, 4)}

    def _evaluate(self, _: Teller) -> Mapping[str, Any]:
        """Decode prompts about documents held back, and write figures, curves and the whole card."""
        head, card = load_head(self.head)
        chain = make_chain(head, self._target)
        profile = profile_steps(self._target, max_batch=1, window=self._window)
        rows = [
            way.figures(kind, profile.decode[0][0])
            for kind, prompts in self._held_back().items()
            for way in compare(
                self._target, chain, prompts, profile, window=self._window, max_draft=self._settings.max_draft
            )
        ]
        made = {
            "command": "python -m ragspec.heads.recipe",
            "commit": _commit(),
            "budget_hours": self._options.hours,
            "texts": self._origin(),
            "stages": {name: dict(given) for name, given in self.record.done.items()},
        }
        measured = {**card.measured, "decoding": rows}
        save_head(head, replace(card, training={**card.training, "made": made}, measured=measured), self.head)
        (self.head / "figures.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (self.head / "figures.md").write_text(_table(rows), encoding="utf-8")
        write_report(self.head)
        return {"prompts": sum(map(len, self._held_back().values()))}

    def _held_back(self) -> Mapping[str, Sequence[Request]]:
        """Prompts of each kind about documents that the head was not trained on."""
        kinds: dict[str, list[Request]] = defaultdict(list)
        for request in self._requests():
            name = PromptName.parse(request.id)
            if is_held_back(name.key) and len(kinds[name.kind]) < _MEASURED:
                kinds[name.kind].append(request)
        return dict(sorted(kinds.items()))

    def _requests(self) -> list[Request]:
        builder = PromptBuilder(self._target.tokenizer, self._window)
        return list(requests(read_plan(self._plan), self._target.tokenizer, builder))

    def _recorded(self) -> int:
        return sum(len(read_answers(path).tokens) for path in answer_files(self._data))

    def _origin(self) -> str:
        if self._options.texts is not None:
            return f"passages of {self._options.texts.name}"
        return "passages of " + "; ".join(f"{source.package} {source.version}, {source.licence}" for source in SOURCES)

    @property
    def _window(self) -> int:
        return min(self._settings.context_window, self._target.context_window)

    @cached_property
    def _target(self) -> Target:
        return load_configured(self._settings)


def _commit() -> str:
    """The commit of the code that runs, `-dirty` behind it where files were changed; `unknown` outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Figures in Markdown."""
    columns = ("prompts", "drafts", "mean_acceptance_length", "draft_acceptance_rate", "tokens_per_second")
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(str(cell).replace('_', ' ') for cell in line)} |\n" for line in lines)
