"""Keeps model libraries' progress bars and advice off a user's terminal."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, only errors of transformers are logged and no bars are drawn; the former state comes back after.

    Standard error is swallowed as well: the GGUF loader draws a tqdm bar that no switch of transformers reaches.
    Exceptions pass, and so does logging, whose handlers hold the real stream.
    """
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity(logging.ERROR)
    chatter.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it without types
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
