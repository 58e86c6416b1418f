"""The Celery application of the nodes and of beat: `celery -A worker.app`. Importing it imports no torch."""

from __future__ import annotations

from ragspec.queue import celery_app
from ragspec.settings import settings

app = celery_app(settings())
# The tasks register themselves with the application when they are imported, at the latest when a node starts.
app.conf.imports = ("worker.tasks", "worker.asking")
