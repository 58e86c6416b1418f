"""`python -m worker.node`: one Celery node for one queue; the supervisor starts it.

Shards are answered in children, which may die with what they have. A single question has a thread, which only waits for the
engine.
"""

from __future__ import annotations

import click

from worker.app import app
from worker.lifeline import die_with


@click.command()
@click.option("--queue", required=True, help="The queue to serve.")
@click.option("--concurrency", type=int, required=True, help="Tasks in flight.")
@click.option("--pool", type=click.Choice(["prefork", "threads"]), default="prefork", help="What the tasks run in.")
@click.option("--name", required=True, help="The node's name; Celery puts the host's in place of %h.")
@click.option("--parent", type=int, required=True, help="The process to end with.")
def node(queue: str, concurrency: int, pool: str, name: str, parent: int) -> None:
    """Serve one queue until SIGTERM."""
    die_with(parent)
    # Gossip and mingle tell nodes of each other, which ours need not know; events are for Flower.
    options = [f"--pool={pool}", "--task-events", "--without-gossip", "--without-mingle", "--loglevel=INFO"]
    app.worker_main(
        ["--quiet", "worker", f"--queues={queue}", f"--concurrency={concurrency}", f"--hostname={name}", *options]
    )


if __name__ == "__main__":
    node()
