"""The weights of published EAGLE-3 heads, by our names."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ragspec.heads.eagle3 import EMBEDDINGS, FILE, OFFSETS, OUTPUT, WEIGHTS, plain_name


def read_weights(folder: Path, vocabulary: int) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """The draft vocabulary, rising, and the weights by our names.

    Raises:
        OSError, SafetensorError: the file cannot be read.
    """
    found = {plain_name(name): value for name, value in load_file(folder / FILE).items()}
    tensors = {ours: torch.cat([found[name] for name in names]) for ours, names in WEIGHTS.items()}
    rows = len(found[OUTPUT]) if OUTPUT in found else vocabulary
    places = torch.arange(len(found[OFFSETS]) if OFFSETS in found else rows)
    tokens = (places + found[OFFSETS].long() if OFFSETS in found else places).sort()
    if OUTPUT in found:
        tensors["output.weight"] = found[OUTPUT][tokens.indices]
    if EMBEDDINGS in found:
        tensors["embedding.weight"] = found[EMBEDDINGS]
    return tuple(tokens.values.tolist()), tensors
