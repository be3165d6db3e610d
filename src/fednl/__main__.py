"""`python -m fednl` is the command `fednl`."""

from fednl.cli import main

main()
