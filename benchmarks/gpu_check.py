"""One page about a device: is the engine exact there, and near to what it can do? `python -m benchmarks.gpu_check`.

First the engine's greedy answers, with drafts and without, alone and in batches, are compared with those of transformers' own
`generate` on the same weights, alone. In float32 they agree token for token; in bfloat16 an answer may part where the two
likeliest tokens lie within rounding, and the largest such gap is printed. int8, which `generate` has not, is compared with the
engine's own answers, alone and without drafts. On CUDA all that is done twice, the target's decode steps as CUDA graphs and
kernel by kernel, and it is counted how many steps of the answers were replays of graphs; on a CPU `--small` runs the padded
step that graphs are made of.

Then prefill and decode at batch 1, 8 and 64 are timed: against the matrix rate and memory bandwidth that the script measures
itself, and against transformers' `generate`, its prompt lookup and continuous batching. The engine runs with drafts, without
them, and on CUDA with drafts and without graphs. End tokens end no answer while timing, so that all write equally much, and no
two prompts share a beginning. `--small` takes a tiny seeded model and sizes for a CPU, in seconds.

Exits with 1 where an answer parts that must not, where no step was replayed that should have been, and where graphs were given
up.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.reference import NO_TOKEN, Tokens, continuous, generate
from ragspec.decoding.engine import Engine
from ragspec.decoding.loading import Precision, load_target, make_recorder, resolve_device
from ragspec.decoding.profiling import profile_steps
from ragspec.decoding.recorded_steps import RecordedSteps
from ragspec.decoding.recorder import PlainRecorder
from ragspec.decoding.request import Request, Sampling
from ragspec.decoding.target import Target
from ragspec.decoding.transformers_target import make_target
from ragspec.demo.prompts import demo_prompts
from ragspec.models import ensure_target
from ragspec.prompt import PromptBuilder
from ragspec.settings import Settings, load_settings

#: Largest difference of two tokens' logits that counts as rounding; transformers' own bfloat16 forward passes of width 1 and 6
#: choose differently up to 0.125 (docs/discussion/exactness.md). In float32 and int8 nothing may part.
ROUNDING = {"float32": 0.0, "bfloat16": 0.25, "float16": 0.05, "int8": 0.0}
#: Draft length of transformers' prompt lookup, as its documentation uses it.
LOOKUP_TOKENS = 10


#: Answers prompts with so many tokens each.
Way = Callable[[list[Tokens], int], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        batches: answers decoded together, one after the other.
        new_tokens: of each answer.
        repeats: of each timing; the median counts.
        matrix: side of the square matrices that are multiplied.
        memory: bytes that are copied.
    """

    batches: tuple[int, ...]
    new_tokens: int
    repeats: int
    matrix: int
    memory: int


@dataclass(frozen=True, slots=True)
class Case:
    """A target, its weights as a plain transformers model (in bfloat16 where the target computes in int8), and prompts."""

    target: Target
    plain: Any
    prompts: list[Tokens]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; seconds are medians over the repeats."""

    batch: int
    name: str
    prompt_tokens: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Exactness:
    """What comparing answers with the reference found.

    Attributes:
        compared: answers.
        parted: of them, those that part from the reference.
        gap: largest difference of the two tokens' logits where they part.
        replayed: steps of the answers that were replays of recorded ones.
    """

    compared: int
    parted: int
    gap: float
    replayed: int


class TokenText:
    """Stands for the tokenizer of the tiny model, whose tokens mean nothing."""

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        """The ids, spelt."""
        del options
        return " ".join(map(str, tokens))


def tiny_case(device: torch.device) -> Case:
    """A seeded model of 2 layers and prompts that repeat themselves."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=255,
        pad_token_id=255,
        bos_token_id=None,
    )
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        # A copy of the config: the attention is chosen in it.
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)  # type: ignore[no-untyped-call]
        models.append(model.to(device))
    # Without CUDA the step that graphs are made of is run by itself.
    recorder = make_recorder(device, "auto") or PlainRecorder()
    target = make_target(models[0], TokenText(), "tiny@0", recorder)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple((torch.randint(255, (8,), generator=generator).tolist() * 5)[: 24 + i]) for i in range(4)]
    return Case(target, models[1], prompts)


def model_case(settings: Settings, device: torch.device, precision: Precision) -> Case:
    """The settings' model and the demo's prompts."""
    folder = ensure_target(settings)
    target = load_target(
        folder,
        str(device),
        precision,
        kernels=settings.kernels_folder,
        threads=settings.threads,
        cuda_graphs=settings.cuda_graphs,
    )
    dtype = torch.bfloat16 if target.precision == "int8" else getattr(torch, target.precision)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    built = demo_prompts(PromptBuilder(target.tokenizer, settings.context_window), max_tokens=256)
    return Case(target, plain.to(device), [prompt.token_ids for prompt in built])


def recorded_steps(case: Case) -> RecordedSteps | None:
    """Of the target, where its steps are recorded."""
    target: Any = case.target  # whichever dataclass it is
    recorded: RecordedSteps | None = getattr(target, "recorded", None)
    return recorded


def replays(case: Case) -> int:
    """Steps of the target that were replays so far."""
    recorded = recorded_steps(case)
    return 0 if recorded is None else recorded.replayed


def without_graphs(case: Case) -> Case | None:
    """The same, each step of the target kernel by kernel; None where that is so anyway."""
    if recorded_steps(case) is None:
        return None
    target: Any = case.target
    return replace(case, target=replace(target, recorded=None))


def answer(engine: Engine, prompts: Sequence[Tokens], max_tokens: int, *, drafts: bool) -> list[Tokens]:
    """The engine's greedy answers, all handed over at once."""
    sampling = Sampling(max_tokens=max_tokens, speculation=drafts)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, sampling))
    done: dict[int, Tokens] = {}
    while engine.has_work:
        done |= {int(one.request_id): one.acceptance.token_ids for one in engine.step()}
    return [done[number] for number in range(len(prompts))]


def partings(case: Case, batches: Sequence[int], max_tokens: int, max_draft: int) -> Exactness:
    """Compare the engine's answers, in batches of each size and with drafts and without, with the reference's."""
    prompts = case.prompts[: max(batches)]
    end = sorted(case.target.eos_ids)
    if case.target.precision == "int8":
        alone = engine_for(case, 1, max_tokens, max_draft)
        expected = [answer(alone, [prompt], max_tokens, drafts=False)[0] for prompt in prompts]
    else:
        expected = [generate(case.plain, [prompt], max_tokens, end)[0] for prompt in prompts]
    compared, parted, worst, replayed = 0, 0, 0.0, 0
    for batch in batches:
        engine = engine_for(case, batch, max_tokens, max_draft)
        for drafts in (False, True):
            before = replays(case)
            found = answer(engine, prompts[:batch], max_tokens, drafts=drafts)
            replayed += replays(case) - before
            for prompt, ours, theirs in zip(prompts, found, expected, strict=False):
                compared += 1
                if ours != theirs:
                    parted += 1
                    worst = max(worst, _gap(case, prompt, ours, theirs))
    return Exactness(compared, parted, worst, replayed)


@torch.inference_mode()
def _gap(case: Case, prompt: Tokens, ours: Tokens, theirs: Tokens) -> float:
    """How far the two tokens lie apart where the answers first differ; infinite where one merely ends early, and in int8."""
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None or case.target.precision == "int8":
        return float("inf")
    tokens = torch.tensor([prompt + theirs[:place]], device=case.plain.device)
    logits = case.plain(tokens).logits[0, -1].float()
    return float((logits[theirs[place]] - logits[ours[place]]).abs())


def engine_for(case: Case, batch: int, max_tokens: int, max_draft: int) -> Engine:
    """An engine with room for the prompts and their answers."""
    window = max(map(len, case.prompts)) + max_tokens
    profile = profile_steps(case.target, max_batch=batch, window=window)
    return Engine(case.target, max_batch=batch, context_window=window, max_draft=max_draft, step_profile=profile)


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of a call, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(side: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Floating point operations a second of a large square product."""
    a, b = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b, repeats, device)


def bandwidth(size: int, device: torch.device, repeats: int) -> float:
    """Bytes a second, read and written, of a copy."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copy: Tensor = torch.empty_like(source)
    return 2 * size / seconds(lambda: copy.copy_(source), repeats, device)


def measure(case: Case, sizes: Sizes, max_draft: int) -> list[Row]:
    """Every way to decode at every batch size; decode time is a whole run's less that of one which stops at the first token."""
    target: Any = case.target  # whichever dataclass it is
    endless = replace(case, target=replace(target, eos_ids=frozenset()))
    fresh = Unshared(case.prompts, case.target.vocabulary)
    rows = []

    def clock(name: str, batch: int, way: Way) -> None:
        first = seconds(lambda: way(fresh.take(batch), 1), sizes.repeats, case.target.device)
        whole = seconds(lambda: way(fresh.take(batch), sizes.new_tokens), sizes.repeats, case.target.device)
        rows.append(Row(batch, name, sum(map(len, fresh.take(batch))), first, max(whole - first, 1e-9)))

    for batch in sizes.batches:
        engine = engine_for(endless, batch, sizes.new_tokens, max_draft)
        clock("ragspec", batch, partial(answer, engine, drafts=True))
        clock("ragspec, no drafts", batch, partial(answer, engine, drafts=False))
        if (plain := without_graphs(endless)) is not None:
            engine = engine_for(plain, batch, sizes.new_tokens, max_draft)
            clock("ragspec, no graphs", batch, partial(answer, engine, drafts=True))
        clock("transformers", batch, lambda prompts, n: generate(case.plain, prompts, n, [NO_TOKEN]))
        if batch == 1:  # its lookup takes no more
            clock(
                "transformers, lookup",
                batch,
                lambda prompts, n: generate(case.plain, prompts, n, [NO_TOKEN], LOOKUP_TOKENS),
            )
        with continuous(case.plain, batch, max(map(len, case.prompts)) + sizes.new_tokens) as way:
            clock("transformers, continuous", batch, way)
    return rows


class Unshared:
    """Hands out prompts of which no two ever begin alike, so that no prefix cache saves a timed prefill."""

    def __init__(self, prompts: Sequence[Tokens], vocabulary: int) -> None:
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._taken = 0

    def take(self, count: int) -> list[Tokens]:
        """The first `count` prompts, from the beginning again where they do not suffice, each with two new first tokens."""
        taken = []
        for place in range(count):
            high, low = divmod(self._taken, self._vocabulary)
            taken.append((low, high, *self._prompts[place % len(self._prompts)][2:]))
            self._taken += 1
        return taken


def table(rows: Sequence[Row], case: Case, new_tokens: int, operations: float, bytes_s: float) -> str:
    """One line a way and batch; shares of the measured rates count a pass that reads weights and cache once a token.

    Each way's weights count as it stores them: the engine's of an int8 target a byte each.
    """
    parameters = sum(p.numel() for p in case.plain.parameters())
    stored = case.plain.dtype.itemsize
    config = case.plain.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head * stored
    lines = ["batch  " + " " * 24 + "  prefill tok/s  of matmul  decode tok/s  of bandwidth  ragspec is"]
    ours = {row.batch: row for row in rows if row.name == "ragspec"}
    for row in rows:
        steps = new_tokens - 1
        prefill = 2 * parameters * row.prompt_tokens / row.prefill_s / operations
        context = row.prompt_tokens + row.batch * new_tokens / 2
        weights = parameters * (1 if row.name.startswith("ragspec") and case.target.precision == "int8" else stored)
        decode = (weights + cached * context) * steps / row.decode_s / bytes_s
        ratio = (row.prefill_s + row.decode_s) / (ours[row.batch].prefill_s + ours[row.batch].decode_s)
        lines.append(
            f"{row.batch:>5}  {row.name:<24}  {row.prompt_tokens / row.prefill_s:>13.0f}  {prefill:>9.1%}"
            f"  {row.batch * steps / row.decode_s:>12.1f}  {decode:>12.1%}  {ratio:>9.2f}x"
        )
    return "\n".join(lines)


def given_up(case: Case) -> bool:
    """Whether the target's steps were recorded and no longer are."""
    recorded = recorded_steps(case)
    return recorded is not None and recorded.given_up


def check(case: Case, sizes: Sizes, max_draft: int) -> bool:
    """Print how exact a target is, with recorded steps where it has them and without; whether that is as it must be."""
    sound = True
    for label, which in (("", case), (", no graphs", without_graphs(case))):
        if which is None:
            continue
        found = partings(which, sizes.batches, sizes.new_tokens, max_draft)
        print(
            f"exactness, {case.target.precision}{label}: {found.parted} of {found.compared} answers part from the reference;"
            f" largest logit gap there {found.gap:.3g}; {found.replayed} steps replayed"
            + (", then graphs given up" if given_up(which) else "")
        )
        sound &= found.gap <= ROUNDING[case.target.precision]
        sound &= recorded_steps(which) is None or (found.replayed > 0 and not given_up(which))
    return sound


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny seeded model, in seconds")
    parser.add_argument("--new-tokens", type=int, default=0, help="default 128, small 12")
    parser.add_argument("--repeats", type=int, default=0, help="default 3, small 1")
    wanted = parser.parse_args()
    settings = load_settings()
    device = resolve_device(settings.device)
    large = (
        Sizes((1, 8, 64), 128, 3, 8192, 4 * 2**30) if device.type == "cuda" else Sizes((1, 8, 64), 128, 3, 2048, 2**30)
    )
    sizes = Sizes((1, 2, 4), 12, 1, 128, 2**20) if wanted.small else large
    sizes = replace(sizes, new_tokens=wanted.new_tokens or sizes.new_tokens, repeats=wanted.repeats or sizes.repeats)

    sound = True
    checked: set[str] = set()
    precisions: tuple[Precision, ...] = ("float32",) if wanted.small else ("float32", settings.precision)
    for precision in precisions:
        case = tiny_case(device) if wanted.small else model_case(settings, device, precision)
        if case.target.precision in checked:
            continue
        checked.add(case.target.precision)
        sound &= check(case, sizes, settings.max_draft)
    operations = matrix_rate(sizes.matrix, case.plain.dtype, device, sizes.repeats)
    bytes_s = bandwidth(sizes.memory, device, sizes.repeats)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{place}: {operations / 1e12:.3g} TFLOP/s in {case.plain.dtype}, {bytes_s / 1e9:.3g} GB/s; torch {torch.__version__}"
    )
    rows = measure(case, sizes, settings.max_draft)
    print(f"{case.target.identity}, {sizes.new_tokens} new tokens, median of {sizes.repeats}")
    print(table(rows, case, sizes.new_tokens, operations, bytes_s))
    if given_up(case):
        print("graphs are given up; the warning above says why")
    sys.exit(not sound or given_up(case))


if __name__ == "__main__":
    main()
