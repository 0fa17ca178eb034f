"""`beheld doctor`: what this machine can run, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; status 0 if everything needed is there."""
    from beheld.tools.doctor import examine

    report = examine()
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def _print(report: dict[str, Any]) -> None:
    for section in ("machine", "libraries", "decisions"):
        print(section)
        for name, value in report[section].items():
            print(f"  {name:22} {value}")
    for problem in report["problems"]:
        print(f"problem: {problem}")
    print("everything needed is there" if report["ok"] else "something needed is missing")
