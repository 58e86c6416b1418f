"""The peers: which adapter, environment and options each stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ragspec.errors import InputError

#: The peer that all others are compared with.
OURS = "ragspec"


@dataclass(frozen=True, slots=True)
class Peer:
    """One row of the table.

    Attributes:
        name: what `--peers` calls it.
        module: its program, run as `python -m`.
        environment: folder of its virtual environment below `--environments`; empty: the harness' own interpreter.
        options: the variant, for the adapter.
        single, batched: whether it is for one answer at a time, for many, or both.
        gguf: whether it reads the GGUF file and not the safetensors.
    """

    name: str
    module: str
    environment: str
    options: dict[str, Any] = field(default_factory=dict)
    single: bool = True
    batched: bool = True
    gguf: bool = False

    def fits(self, concurrency: int) -> bool:
        """Whether it is meant for so many answers at once."""
        return self.single if concurrency == 1 else self.batched


def _peer(name: str, adapter: str, environment: str, options: dict[str, Any] | None = None, **kind: bool) -> Peer:
    return Peer(name, f"benchmarks.peers.adapters.{adapter}", environment, options or {}, **kind)


PEERS = (
    _peer(OURS, "ragspec", ""),
    _peer("ragspec-plain", "ragspec", "", {"speculation": False}),
    _peer("transformers", "transformers", "transformers", {"mode": "plain"}, batched=False),
    # Its `generate` takes prompt lookup for a batch of one only.
    _peer("transformers-lookup", "transformers", "transformers", {"mode": "lookup"}, batched=False),
    _peer("transformers-padded", "transformers", "transformers", {"mode": "padded"}, single=False),
    _peer("transformers-continuous", "transformers", "transformers", {"mode": "continuous"}, single=False),
    _peer("vllm", "vllm", "vllm"),
    _peer("vllm-lookup", "vllm", "vllm", {"lookup": True}),
    _peer("openvino", "openvino", "openvino", gguf=True),
    _peer("openvino-lookup", "openvino", "openvino", {"lookup": True}, gguf=True),
    _peer("llama-cpp", "llama_cpp", "llama_cpp", gguf=True),
    _peer("llama-cpp-lookup", "llama_cpp", "llama_cpp", {"lookup": True}, gguf=True),
)


def choose(names: Sequence[str], concurrency: int) -> list[Peer]:
    """The named peers, or all that are meant for this concurrency; ragspec first, as the others are compared with it.

    Raises:
        InputError: code `unknown_peer`.
    """
    if not names:
        return [peer for peer in PEERS if peer.fits(concurrency)]
    known = {peer.name: peer for peer in PEERS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"There is no peer {unknown[0]!r}.", f"Known are {', '.join(known)}.", code="unknown_peer")
    return [known[name] for name in dict.fromkeys(names)]
