"""A resident process with a stand-in engine: everything around the model is the real thing.

`RAGSPEC_HOME/stand-in.json` says how the engine behaves: `step_s`, seconds a step takes; `hang_at` and `die_at`, the
question at which the first engine of this home hangs or is gone.
"""

from __future__ import annotations

import json
import os
import signal
import time

from ragspec.settings import Settings
from tests.worker_stand_in import StandInEngine, stand_in_parts
from worker.resident.__main__ import command
from worker.resident.parts import Parts


def load(settings: Settings) -> Parts:
    knobs = json.loads((settings.home / "stand-in.json").read_text())

    def first(questions: list[str], knob: str) -> bool:
        if knobs.get(knob) not in questions:
            return False
        try:
            (settings.home / knob).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def on_step(questions: list[str]) -> None:
        time.sleep(knobs["step_s"])
        if first(questions, "hang_at"):
            time.sleep(1000)
        if first(questions, "die_at"):
            os.kill(os.getpid(), signal.SIGKILL)

    return stand_in_parts(StandInEngine(settings.max_batch, on_step))


if __name__ == "__main__":
    command(load)()
