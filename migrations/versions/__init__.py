"""One file a revision; never edit one that was released."""
