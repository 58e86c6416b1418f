"""ragspec: bulk question answering over your own documents, decoded speculatively and without loss."""

__version__ = "0.1.0"
