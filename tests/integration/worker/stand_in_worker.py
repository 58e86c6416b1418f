"""A worker whose resident process has a stand-in engine."""

from __future__ import annotations

import logging
import sys

from ragspec.settings import load_settings
from worker.supervisor import run

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(message)s")
    sys.exit(run(load_settings(), [sys.executable, "-m", "tests.integration.worker.stand_in_resident"]))
