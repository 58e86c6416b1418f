"""Turns text into unit vectors with a sentence-transformers model; a long text loses nothing to truncation."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ragspec.corpus.chunks import TokenSpans, split_text
from ragspec.errors import ModelUnavailableError
from ragspec.models import Tell, ensure_embedder, model_identity
from ragspec.settings import Settings

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_log = logging.getLogger(__name__)
#: Passages per forward pass: larger gains nothing on a CPU, and a GPU is not kept waiting by it.
BATCH = 64
#: Window of a model that states no limit, in tokens.
_DEFAULT_WINDOW = 512


class Embedder:
    """An embedding model; safe to use from several threads, which take turns.

    Attributes:
        name: identity, `name@fingerprint`.
        dimension: length of a vector.
        max_tokens: most tokens of text that one forward pass reads, without special tokens and the model's prompt.
    """

    def __init__(self, name: str, model: SentenceTransformer) -> None:
        self.name = name
        self._model = model
        self._lock = threading.Lock()
        # A copy: the model's own is set to truncate and pad.
        self._tokenizer = copy.deepcopy(model.tokenizer.backend_tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        prompt = max((self.count_tokens(prompt or "") for prompt in model.prompts.values()), default=0)
        special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self.max_tokens: int = (model.max_seq_length or _DEFAULT_WINDOW) - special - prompt
        self.dimension: int = model.get_embedding_dimension() or 0

    def embed(self, texts: Sequence[str], kind: Literal["question", "passage"] = "question") -> NDArray[np.float32]:
        """Vectors of unit length, [n, dimension].

        A text longer than `max_tokens` is embedded window by window, and its vector is the mean of theirs: cutting it
        off would hide its end from every search.
        """
        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        windows: list[str] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            spans = split_text(text, self.token_spans, self.max_tokens) or [(0, len(text))]
            windows += [text[start:end] for start, end in spans]
            owners += [owner] * len(spans)
        encode = self._model.encode_query if kind == "question" else self._model.encode_document
        with self._lock:
            vectors = encode(windows, batch_size=BATCH, show_progress_bar=False, normalize_embeddings=True)
        if len(windows) == len(texts):
            return np.asarray(vectors, dtype=np.float32)
        sums = np.zeros((len(texts), self.dimension), dtype=np.float32)
        np.add.at(sums, owners, np.asarray(vectors, dtype=np.float32))
        unit: NDArray[np.float32] = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        return unit

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, special tokens not counted."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def token_spans(self, text: str) -> TokenSpans:
        """Where each token lies in a text, as [start, end) character offsets."""
        spans: TokenSpans = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return spans


def load_embedder(settings: Settings, tell: Tell = _log.info) -> Embedder:
    """Load the embedder of the settings onto its device; `tell` gets a line for each thing that takes time.

    Raises:
        ModelUnavailableError: it cannot be had (see `ragspec.models.ensure_embedder`) or loaded.
    """
    folder = ensure_embedder(settings, tell)
    try:
        import torch
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ModelUnavailableError(f"The embedder needs {error.name}.", "Install `ragspec[worker]`.") from error
    from ragspec.models.quiet import quiet_libraries

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with quiet_libraries():
            model = SentenceTransformer(str(folder), device=device, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelUnavailableError(f"The embedder in {folder} cannot be loaded: {error}.") from error
    return Embedder(model_identity(settings.embedder, Path(folder)), model)
