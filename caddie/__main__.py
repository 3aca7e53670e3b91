"""`python -m caddie`."""

from caddie.cli import main

main()
