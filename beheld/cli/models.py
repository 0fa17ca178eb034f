"""`beheld models`: which families run, and which are refused and why."""

from __future__ import annotations

import argparse

from beheld.families import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--markdown", action="store_true", help="print the page docs/models.md")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    if arguments.markdown:
        print(page.markdown(), end="")
        return 0
    print("runs, and answers as transformers does: alone, in batches, after preemption, and with")
    for row in page.tested():
        print(f"  {row.name:18} {', '.join(('text', *row.modalities)):26} {row.example:50} {page.checked(row)}")
    print("refused")
    for name, reason in page.refused().items():
        print(f"  {name:18} {reason}")
    return 0
