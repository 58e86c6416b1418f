"""Where models come from: `ensure_*` get one, `find_model` only looks, `model_identity` names one for ever."""

from ragspec.models.manifest import fingerprint
from ragspec.models.obtain import (
    Tell,
    ensure_embedder,
    ensure_model,
    ensure_target,
    find_model,
    model_identity,
    model_label,
)

__all__ = [
    "Tell",
    "ensure_embedder",
    "ensure_model",
    "ensure_target",
    "find_model",
    "fingerprint",
    "model_identity",
    "model_label",
]
