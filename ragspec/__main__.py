"""`python -m ragspec`."""

from ragspec.cli import main

main()
