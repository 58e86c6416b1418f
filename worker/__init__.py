"""The worker: a resident engine process, the torch-free Celery nodes that feed it, and the supervisor of both."""
