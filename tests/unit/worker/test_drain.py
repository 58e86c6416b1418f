"""A node's wish to stop reaches processes that were forked before it."""

from __future__ import annotations

import os
import select

from worker.drain import Drain


def test_a_forked_child_sees_the_flag_that_its_parent_sets() -> None:
    drain = Drain()
    assert not drain.begun()
    child = os.fork()
    if child == 0:
        woken = select.select([drain], [], [], 20)[0]
        os._exit(0 if woken and drain.begun() else 1)
    drain.begin()
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert drain.begun()  # whoever looked has not taken it away
    drain.close()
