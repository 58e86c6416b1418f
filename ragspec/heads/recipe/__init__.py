"""How the shipped head is made: `python -m ragspec.heads.recipe`, or `make head`."""
