"""Single questions on their way to a worker and back, over Redis alone: what a gateway asks, and what it hears.

The question travels as a Celery message on the queue `ask`. What becomes of it comes back, event by event, in the Redis stream
of the gateway that asked; a word in the channel `CANCELLED` stops it. Nothing of it is kept: who wants a record submits a job.
"""
