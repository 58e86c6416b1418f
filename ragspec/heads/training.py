"""Training a head on recorded answers: seeded, resumable, stopped by the acceptance it reaches."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from ragspec import __version__
from ragspec.decoding.target import Target
from ragspec.errors import InputError
from ragspec.heads.acceptance import HeadAcceptance, measure
from ragspec.heads.architecture import Head, make_head
from ragspec.heads.batches import Positions, draft_vocabulary
from ragspec.heads.card import CARD, HeadCard, read_head_card
from ragspec.heads.checkpoint import head_identity, load_head, misfit, model_of, save_head
from ragspec.heads.shape import ATTENTION, AttentionShape, HeadShape, eagle3_layers
from ragspec.heads.store import answer_files, read_answers, read_card
from ragspec.heads.walk import Place, Walker
from ragspec.heads.walking import make_walker

Loss = Literal["kl", "acceptance"]

#: Where a run can be taken up again, and what it has said so far.
_STATE, LOG = "training.safetensors", "log.jsonl"
#: Steps until the learning rate is whole.
_WARM_UP = 100
#: Of the learning rate at the end.
_LEAST_RATE = 0.05
#: Width of an attention head's queries and keys, where it divides that of the states.
_HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a head is trained.

    Attributes:
        architecture: of the head.
        inner: width of its own layer.
        draft_tokens: size of the draft vocabulary.
        depth: places ahead.
        loss: `kl`, the divergence from the target's distribution, or `acceptance`, 1 - sum min(p, q), what rejection
            sampling would refuse.
        step_weight: each place counts so much of the one before.
        epochs: times through the data.
        batch: positions of a step.
        learning_rate: at its highest.
        weight_decay: of AdamW (arXiv 1711.05101).
        patience: epochs without more acceptance before training ends.
        seed: of the weights and the order.
    """

    architecture: str = "recurrent"
    inner: int = 1536
    draft_tokens: int = 8192
    depth: int = 4
    loss: Loss = "kl"
    step_weight: float = 0.8
    epochs: int = 4
    batch: int = 1024
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    patience: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what trains nothing. Comparisons are written so that NaN fails them.

        Raises:
            InputError: a value means nothing (code `bad_option`).
        """
        for name, allowed, fits in (
            ("learning_rate", "above 0 and at most 1", 0 < self.learning_rate <= 1),
            ("weight_decay", "from 0 to 1", 0 <= self.weight_decay <= 1),
            ("step_weight", "above 0 and at most 1", 0 < self.step_weight <= 1),
            *((n, "at least 1", getattr(self, n) >= 1) for n in ("inner", "draft_tokens", "depth", "epochs", "batch")),
        ):
            if not fits:
                msg = f"{name.replace('_', '-')} is {getattr(self, name)!r}."
                raise InputError(msg, f"It must be {allowed}.", code="bad_option")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a training run says now and then; every line of its log.

    Attributes:
        epoch: from 0.
        step: optimizer steps so far.
        steps: of the whole run.
        loss: running mean.
        seconds: so far, also before a stop.
        by_place: acceptance by place on the answers held back, after an epoch; else None.
        mean_acceptance_length: on those, with the head alone, after an epoch; else None.
    """

    epoch: int
    step: int
    steps: int
    loss: float
    seconds: float
    by_place: list[float] | None = None
    mean_acceptance_length: float | None = None


def train(
    target: Target,
    data: Path,
    folder: Path,
    recipe: Recipe,
    *,
    start: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> HeadAcceptance:
    """Train a head and leave the best epoch's in `folder`; a run that was cut off there goes on behind its last epoch.

    Args:
        target: whose tokens it is to propose; it gives embeddings and output rows, which stay as they are.
        data: recorded answers (`ragspec.heads.store`).
        folder: for head, card, log and what resuming needs.
        recipe: how.
        start: a head to go on from instead of fresh weights; its own shape counts.
        progress: told every few seconds, and after each epoch.

    Returns:
        What the best head reached on the answers held back.

    Raises:
        InputError: too little data, or of another target (codes `no_head_data`, `other_target`), or without the prompts that
            the architecture needs (`no_head_data`), or a target that does not give it what it reads (`bad_option`);
            `start` is of another target;
            `folder` holds a run of another recipe or other data (code `other_recipe`); the loss grew beyond all numbers
            (`diverged`).
    """
    files = answer_files(data)
    card = read_card(data)
    if model_of(card.target) != model_of(target.identity):
        msg = f"{data} holds answers of {card.target}; the target is {target.identity}."
        raise InputError(msg, "Record answers of this target with `ragspec head data`.", code="other_target")
    torch.manual_seed(recipe.seed)
    origin = "fresh weights"
    if start is None:
        head = _new_head(target, files, recipe)
    else:
        head, recipe = _started(target, start, recipe)
        origin = head_identity(start, read_head_card(start))
    training = {
        "data": {**asdict(card), "tokens": {path.name: len(read_answers(path).tokens) for path in files}},
        "recipe": asdict(recipe),
        "start": origin,
    }
    head = head.to(target.device)
    return _Run(target, make_walker(head, target), files, folder, recipe, progress).finish(training)


def _new_head(target: Target, files: list[Path], recipe: Recipe) -> Head:
    chosen = draft_vocabulary(files, recipe.draft_tokens, target.vocabulary)
    attention = None
    if recipe.architecture == ATTENTION:
        if not target.layers:
            msg = (
                "An attention head reads the states between the target's layers, and of this target they cannot be had."
            )
            raise InputError(msg, "Train another architecture.", code="bad_option")
        # The widest heads that divide the states, each with keys of its own.
        dim = math.gcd(target.hidden_size, _HEAD_DIM)
        heads = target.hidden_size // dim
        attention = AttentionShape(heads, heads, dim, target.hidden_size, eagle3_layers(target.layers))
    shape = HeadShape(target.hidden_size, recipe.inner, chosen, recipe.depth, attention=attention)
    return make_head(recipe.architecture, shape)


def _started(target: Target, start: Path, recipe: Recipe) -> tuple[Head, Recipe]:
    """A head to go on from, and the recipe with its shape."""
    head, card = load_head(start)
    if reason := misfit(card, target):
        msg = f"The head in {start} does not fit the target: {reason}."
        raise InputError(msg, "Go on from a head of this target.", code="other_target")
    shape = head.shape
    fixed = replace(
        recipe,
        architecture=head.architecture,
        inner=shape.inner,
        draft_tokens=len(shape.draft_tokens),
        depth=shape.depth,
    )
    return head.requires_grad_(requires_grad=True), fixed


class _Run:
    def __init__(
        self,
        target: Target,
        walker: Walker,
        files: list[Path],
        folder: Path,
        recipe: Recipe,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._target, self._walker, self._head, self._files = target, walker, walker.head, files
        self._folder, self._recipe, self._progress = folder, recipe, progress
        self._optimizer = torch.optim.AdamW(
            self._head.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.95)
        )
        learnt, held = (
            [len(walker.positions(read_answers(path), held_back=back).places) for path in files]
            for back in (False, True)
        )
        if not (any(learnt) and any(held)):
            msg = f"{files[0].parent} holds too few answers: some must be trained on and some held back."
            raise InputError(msg, "Record more of them with `ragspec head data`.", code="no_head_data")
        self._steps = recipe.epochs * sum(math.ceil(count / recipe.batch) for count in learnt)
        self._step = 0
        self._loss = math.nan
        self._began = time.monotonic()
        self._before = 0.0  # seconds that this run took before it was stopped
        self._told = 0.0

    def finish(self, training: Mapping[str, Any]) -> HeadAcceptance:
        epoch, best, since = self._resume(training)
        reached: HeadAcceptance | None = None
        while epoch < self._recipe.epochs and since < self._recipe.patience:
            for batch in self._batches(epoch):
                self._learn(batch)
                self._tell(epoch)
            found = measure(self._walker, self._files, self._recipe.depth)
            self._tell(epoch, found)
            epoch += 1
            if found.mean_acceptance_length > best and math.isfinite(self._loss):
                best, since, reached = found.mean_acceptance_length, 0, found
                save_head(self._head, self._card(training, found, epoch), self._folder)
            else:
                since += 1
            self._save(training, epoch, best, since)
        if not math.isfinite(self._loss) and not (self._folder / CARD).exists():
            msg = "The loss is no number any more."
            raise InputError(msg, "Lower the learning rate.", code="diverged")
        if reached is None:
            head = load_head(self._folder)[0].to(self._target.device)
            reached = measure(make_walker(head, self._target), self._files, self._recipe.depth)
        return reached

    def _batches(self, epoch: int) -> Iterator[Positions]:
        generator = torch.Generator().manual_seed(self._recipe.seed * 1000 + epoch)
        for number in torch.randperm(len(self._files), generator=generator).tolist():
            places = self._walker.positions(read_answers(self._files[number]), held_back=False)
            yield from places.shuffled(generator).split(self._recipe.batch)

    def _learn(self, batch: Positions) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * self._rate()
        total = torch.zeros(())
        with torch.autocast(self._target.device.type, torch.bfloat16):
            for number, place in enumerate(self._walker.walk(batch, self._recipe.depth)):
                weight = self._recipe.step_weight**number / len(batch.places)
                total = total + weight * _loss(self._recipe.loss, place)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        self._step += 1
        value = float(total.detach())
        self._loss = value if math.isnan(self._loss) else 0.98 * self._loss + 0.02 * value

    def _rate(self) -> float:
        """Of the learning rate: a short rise, then half a cosine."""
        done = self._step / self._steps
        return min(1.0, (self._step + 1) / _WARM_UP) * (
            _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))
        )

    def _tell(self, epoch: int, found: HeadAcceptance | None = None) -> None:
        seconds = self._seconds()
        if found is None and seconds - self._told < 5:
            return
        self._told = seconds
        said = Progress(
            epoch,
            self._step,
            self._steps,
            round(self._loss, 4),
            round(seconds, 1),
            None if found is None else [round(rate, 4) for rate in found.by_place],
            None if found is None else round(found.mean_acceptance_length, 4),
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(said)) + "\n")
        if self._progress is not None:
            self._progress(said)

    def _card(self, training: Mapping[str, Any], found: HeadAcceptance, epochs: int) -> HeadCard:
        shape = self._head.shape
        return HeadCard(
            architecture=self._head.architecture,
            target=model_of(self._target.identity),
            vocabulary=self._target.vocabulary,
            hidden=shape.hidden,
            inner=shape.inner,
            depth=shape.depth,
            epsilon=shape.epsilon,
            attention=None if shape.attention is None else asdict(shape.attention),
            training={**training, "epochs": epochs, "version": __version__},
            measured={
                "acceptance_by_place": [round(rate, 4) for rate in found.by_place],
                "mean_acceptance_length": round(found.mean_acceptance_length, 4),
                "by_kind": {kind: round(found.of_kind(kind), 4) for kind in sorted(found.tokens)},
            },
        )

    def _save(self, training: Mapping[str, Any], epoch: int, best: float, since: int) -> None:
        tensors = {f"head.{name}": value for name, value in self._head.state_dict().items()}
        for name, parameter in self._head.named_parameters():
            # A place that no draft has reached yet has no state.
            tensors |= {f"{key}.{name}": value for key, value in self._optimizer.state.get(parameter, {}).items()}
        standing = {
            "training": training,
            "epoch": epoch,
            "best": best,
            "since": since,
            "step": self._step,
            "loss": self._loss,
            "seconds": self._seconds(),
        }
        part = self._folder / f"{_STATE}.part"
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            part,
            metadata={name: json.dumps(value) for name, value in standing.items()},
        )
        part.replace(self._folder / _STATE)

    def _resume(self, training: Mapping[str, Any]) -> tuple[int, float, int]:
        path = self._folder / _STATE
        if not path.exists():
            return 0, 0.0, 0
        with safe_open(path, framework="pt") as file:
            meta = file.metadata()
        standing = {name: json.loads(value) for name, value in meta.items()}
        if standing["training"] != json.loads(json.dumps(training)):
            msg = f"{self._folder} holds a run of another recipe or other data."
            raise InputError(msg, "Choose another folder, or the same recipe to go on.", code="other_recipe")
        tensors = load_file(path)
        self._head.load_state_dict({n[5:]: value for n, value in tensors.items() if n.startswith("head.")})
        for name, parameter in self._head.named_parameters():
            kept = {key: tensors.get(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if kept["step"] is not None:
                # Moments lie with their weights; the count of steps stays on CPU, where AdamW keeps it.
                self._optimizer.state[parameter] = {
                    key: value if key == "step" or value is None else value.to(parameter.device)
                    for key, value in kept.items()
                }
        self._step, self._loss, self._before = standing["step"], standing["loss"], standing["seconds"]
        self._forget_after(self._step)
        return standing["epoch"], standing["best"], standing["since"]

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def _forget_after(self, step: int) -> None:
        """Drop from the log what a stopped run said of steps that are now done again."""
        path = self._folder / LOG
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")


def _loss(kind: Loss, place: Place) -> Tensor:
    """Summed over the rows."""
    with torch.autocast(place.scores.device.type, enabled=False):
        ours, theirs = place.scores.float(), place.expected.float().softmax(-1)
        if kind == "kl":  # less the target's entropy, which has no gradient
            return functional.cross_entropy(ours, theirs, reduction="sum")
        return (1 - torch.minimum(ours.softmax(-1), theirs).sum(-1)).sum()
