"""The speculation head: small networks on the target's final hidden state that propose its next tokens.

Architectures and their registry (`architecture`, `recurrent`, `mlp`), training data and training, evaluation, and checkpoints.
How a head drafts inside the engine is in `ragspec.decoding.head_drafter`.
"""
