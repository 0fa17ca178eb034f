"""`python -m beheld` is the `beheld` command."""

from __future__ import annotations

from beheld.cli.main import command

if __name__ == "__main__":
    command()
