"""How our processes start further ones in Python."""

from __future__ import annotations

import sys

#: This interpreter, without the working directory on its import path: a user may well have a folder `worker` there, and
#: `python -m worker` would run that one. PYTHONPATH holds as ever.
PYTHON = (sys.executable, "-P")
