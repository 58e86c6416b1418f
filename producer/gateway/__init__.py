"""The front door: questions over HTTP, answered by the workers through Redis. Nothing here imports torch."""
