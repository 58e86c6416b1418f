"""A peer of the benchmarks without a model: answers with the beginning of the prompt, or fails as its options say.

Options: `journal`, a file that gets a line `name pid` a start; `fail`: load, run, hang or miscount; `after`: how many starts
go well before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.protocol import Load, Prompt, Ready, Run, serve


class StandIn:
    def __init__(self, load: Load) -> None:
        print("a library says hello on standard output")
        journal = Path(load.options["journal"])
        with journal.open("a") as file:
            file.write(f"{load.options['name']} {os.getpid()}\n")
        starts = sum(line.split()[0] == load.options["name"] for line in journal.read_text().splitlines())
        self.fail = load.options.get("fail", "") if starts > load.options.get("after", 0) else ""
        if self.fail == "load":
            raise RuntimeError("there is no such model")
        self.ready = Ready({"stand-in": "1.0"}, f"{load.threads} threads")

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        if self.fail == "run":
            os._exit(3)
        if self.fail == "hang":
            time.sleep(60)
        counted = [len(prompt.tokens) + (self.fail == "miscount") for prompt in prompts]
        return Run([prompt.tokens[:max_tokens] for prompt in prompts], counted, cached_tokens=len(prompts))


if __name__ == "__main__":
    serve(StandIn)
