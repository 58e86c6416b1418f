"""One small program a peer; each runs in its own environment and says why it sets what it sets."""
