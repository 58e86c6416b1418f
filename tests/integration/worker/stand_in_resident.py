"""A resident process with a stand-in engine: everything around the model is the real thing.

`RAGSPEC_HOME/stand-in.json` says how the engine behaves, also while it runs: `step_s`, seconds a step takes; `hang_at`, the
question at which the first engine of this home hangs; `die_at`, the one at which every engine dies.
"""

from __future__ import annotations

import json
import os
import time

from ragspec.settings import Settings
from tests.worker_stand_in import StandInEngine, stand_in_parts
from worker.resident.__main__ import command
from worker.resident.parts import Parts


def load(settings: Settings) -> Parts:
    hung = settings.home / "hung"

    def on_step(questions: list[str]) -> None:
        knobs = json.loads((settings.home / "stand-in.json").read_text())
        time.sleep(knobs["step_s"])
        if knobs.get("hang_at") in questions and not hung.exists():
            hung.touch()
            time.sleep(1000)
        if knobs.get("die_at") in questions:
            os._exit(1)

    return stand_in_parts(StandInEngine(settings.max_batch, on_step))


if __name__ == "__main__":
    command(load)()
