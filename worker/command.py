"""`python -m worker.command beat`: Celery's own commands on our application.

`celery -A worker.app` does the same, but looks for `worker` in the working directory first, whatever Python was told.
"""

from __future__ import annotations

import sys

from worker.app import app

if __name__ == "__main__":
    sys.exit(app.start(sys.argv[1:]))
