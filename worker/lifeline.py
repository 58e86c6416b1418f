"""A process that ends with the one that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import sys

from billiard.util import set_pdeathsig


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, is gone; without effect off Linux.

    The thread that started this process counts as the parent, so it must be one that stays: the main thread.
    """
    if sys.platform != "linux":
        return
    set_pdeathsig(signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
