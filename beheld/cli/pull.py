"""`beheld pull MODEL`: fetches a checkpoint, checks its files, and tells its licence."""

from __future__ import annotations

import argparse
import sys

from beheld.core.config import EngineArgs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a short name (see `beheld models --short`), or a hub name")
    parser.add_argument("--revision", help="a branch, tag or commit; the main branch by default")
    parser.add_argument("--download-dir", metavar="FOLDER", help="where to keep it; the hub's cache by default")
    parser.add_argument("--hf-token", metavar="KEY", help="the key for the hub; by default the one that was stored")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch what is missing, and print the folder."""
    from beheld.checkpoint.resolve import pull

    args = EngineArgs(
        model=arguments.model,
        revision=arguments.revision,
        download_dir=arguments.download_dir,
        hf_token=arguments.hf_token,
    )
    pulled = pull(args, lambda words: print(words, file=sys.stderr, flush=True))
    print(pulled)
    return 0
