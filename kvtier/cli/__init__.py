"""The `kvtier` command."""

from kvtier.cli.main import main

__all__ = ["main"]
