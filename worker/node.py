"""`python -m worker.node`: one prefork Celery node for one queue; the supervisor starts it."""

from __future__ import annotations

import click

from worker.app import app
from worker.lifeline import die_with


@click.command()
@click.option("--queue", required=True, help="The queue to serve.")
@click.option("--concurrency", type=int, required=True, help="Shards in flight.")
@click.option("--name", required=True, help="The node's name; Celery puts the host's in place of %h.")
@click.option("--parent", type=int, required=True, help="The process to end with.")
def node(queue: str, concurrency: int, name: str, parent: int) -> None:
    """Serve one queue until SIGTERM."""
    die_with(parent)
    # Gossip and mingle tell nodes of each other, which ours need not know; events are for Flower.
    options = ["--pool=prefork", "--task-events", "--without-gossip", "--without-mingle", "--loglevel=INFO"]
    app.worker_main(
        ["--quiet", "worker", f"--queues={queue}", f"--concurrency={concurrency}", f"--hostname={name}", *options]
    )


if __name__ == "__main__":
    node()
