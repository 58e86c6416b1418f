"""Models of the Hugging Face hub: safe files only, in the hub's own cache."""

from __future__ import annotations

from pathlib import Path

from ragspec.models.manifest import MODEL_FILES
from ragspec.models.missing import NotHereError

#: Copies of the same weights for other runtimes.
_OTHER_RUNTIMES = ("onnx/*", "openvino/*", "original/*", "coreml/*")
#: Seconds to wait for the hub's first answer; unreachable, the copy in the cache is taken.
_FIRST_ANSWER = 5


def download_snapshot(name: str, *, cached_only: bool = False) -> Path:
    """The folder of hub model `name`, brought up to date where the hub can be reached, else as it lies in the cache.

    Raises:
        NotHereError: neither the hub nor the cache has it, or not as safetensors.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise NotHereError("the hub's client is not installed (extra `worker`)") from None
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            name,
            allow_patterns=list(MODEL_FILES),
            ignore_patterns=list(_OTHER_RUNTIMES),
            etag_timeout=_FIRST_ANSWER,
            local_files_only=cached_only,
        )
    except HFValidationError:
        raise NotHereError("not a hub id (`owner/name`)") from None
    except OSError as error:  # HTTP errors, a missing cache entry and offline mode are all OSErrors
        raise NotHereError(" ".join(str(error).split())) from error
    return Path(folder)
