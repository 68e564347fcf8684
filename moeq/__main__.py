"""`python -m moeq` is the `moeq` command."""

from moeq.cli import main

main()
