"""The engine: target, cache, drafters, verification, scheduling and the acceptance record.

`Engine`, `Target` and `load_target` import torch and are reached by their modules; the names here do not.
"""

from ragspec.decoding.acceptance import AcceptanceRecord, Source
from ragspec.decoding.request import Completion, FinishReason, Request, Sampling

__all__ = ["AcceptanceRecord", "Completion", "FinishReason", "Request", "Sampling", "Source"]
