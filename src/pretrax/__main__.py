"""`python -m pretrax`: the same as `pretrax`."""

from pretrax.cli import main

main()
