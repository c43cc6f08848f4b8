"""`python -m fedkd` is `fedkd`."""

from fedkd.cli import main

main()
