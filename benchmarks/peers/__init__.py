"""ragspec beside what one would otherwise pick: `python -m benchmarks.peers`; docs/howto/benchmarks.md says how to read it.

What runs inside a peer's environment (`protocol`, `adapters`) imports nothing but the standard library and that peer.
"""
