"""The one process of a worker that imports torch: retrieval, prompts and the engine, behind a Unix socket."""
