"""Writes the page of all commands from the parser itself, and gives the wide table of models the whole page."""

from __future__ import annotations

import argparse
from typing import Any

from beheld.cli.main import build_parser

MARK = "<!-- commands -->"
SHARED = "engine options"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the commands in the place of the mark; the page of models is written by a command and has no settings."""
    if page.file.src_uri == "models.md":
        page.meta["hide"] = ["navigation", "toc"]
    return markdown.replace(MARK, commands()) if page.file.src_uri == "reference/cli.md" else markdown


def commands() -> str:
    """One section for each command, in the parser's order."""
    lines: list[str] = []
    for name, parser in _subparsers(build_parser()).items():
        lines += _section(f"beheld {name}", parser, 2)
        for inner, nested in _subparsers(parser).items():
            lines += _section(f"beheld {name} {inner}", nested, 3)
    return "\n".join(lines)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _section(title: str, parser: argparse.ArgumentParser, level: int) -> list[str]:
    lines = [f"{'#' * level} `{title}`", "", *([parser.description, ""] if parser.description else [])]
    rows, shared = [], False
    for group in parser._action_groups:
        for action in group._group_actions:
            if group.title == SHARED:
                shared = True
            elif not isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
                rows.append(f"| {_name(action)} | {_help(action)} |")
    if rows:
        lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    if shared:
        lines += ["It also takes the [engine options](options.md).", ""]
    return lines


def _name(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`{metavar}`"
    # The spelling with dashes; the one with underscores is the same flag.
    names = [name for name in action.option_strings if "_" not in name]
    value = "" if action.nargs == 0 else f" {metavar}"
    return ", ".join(f"`{name}{value}`" for name in names)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%").replace("|", "\\|")
