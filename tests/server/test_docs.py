"""docs/reference names every route, flag and environment variable there is, with its default, and no other."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import fields

import pytest

from beheld.cli import bench, chat, serve, vllm_flags
from beheld.core.config import EngineArgs, MediaLimits
from beheld.flags.engine import SKIPPED
from beheld.flags.help import FLAG_HELP
from beheld.utils import env
from tests.server import flag_table
from tests.server.cases import ROOT
from tests.server.running import Running

REFERENCE = ROOT / "docs" / "reference"
OPTIONS = (REFERENCE / "options.md").read_text(encoding="utf-8")
SERVER = (REFERENCE / "server.md").read_text(encoding="utf-8")
ENVIRONMENT = (REFERENCE / "environment.md").read_text(encoding="utf-8")


def flags_of(*parsers: argparse.ArgumentParser) -> set[str]:
    """Every flag, in its spelling with dashes."""
    found: set[str] = set()
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= flags_of(*action.choices.values())
            found |= {option for option in action.option_strings[:1] if option.startswith("--")}
    return found - {"--help"}


def parser_of(module: object) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser


def test_every_flag_is_told_and_no_other() -> None:
    pattern = r"(?<![\w-])--[a-z][a-z0-9-]+"
    serving = flags_of(parser_of(serve))
    missing = serving - set(re.findall(pattern, OPTIONS))
    assert not missing, f"docs/reference/options.md does not name {sorted(missing)}"
    told = set(re.findall(pattern, OPTIONS + SERVER + ENVIRONMENT))
    others = flags_of(parser_of(chat), parser_of(bench)) | {f"--{name}" for name in vllm_flags.FLAGS}
    assert told <= serving | others, f"docs/reference names {sorted(told - serving - others)}"


def test_the_tables_of_flags_and_limits_are_what_the_code_says() -> None:
    for page, text in flag_table.pages().items():
        assert page.read_text(encoding="utf-8") == text, "python -m tests.server.flag_table"
    assert set(FLAG_HELP) == {field.name for field in dataclasses.fields(EngineArgs)} - SKIPPED


def test_the_changelog_links_to_no_file() -> None:
    # It is a page of the site, too, where the path to a file is another one.
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []


def test_every_dependency_is_told_and_no_other() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Dependencies")[1].split("\n## ")[0]
    told = {
        name.strip() for row in re.findall(r"^\| ([a-z][^|]*) \|", section, re.MULTILINE) for name in row.split(",")
    }
    names = {re.split("[><=]", entry)[0] for entry in project["dependencies"]}
    assert told - {"package"} == names
    development = section.split("For development:")[1]
    for entry in project["optional-dependencies"]["dev"]:
        assert re.search(rf"\b{re.split('[><=]', entry)[0]}\b", development), entry


def test_every_route_is_told_and_no_other(running: Running) -> None:
    table = SERVER.split("## Routes")[1].split("\n\n")[1]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    told = {path for row in rows for path in re.findall(r"`(?:[A-Z]+ )?(/[^`]*)`", row)}
    assert told == {route.path.replace(":path", "") for route in running.app.routes}  # type: ignore[attr-defined]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_lines_of_the_readme_work(running: Running) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^curl .*$", text, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line.replace("http://127.0.0.1:8000", running.url))
        done = subprocess.run(
            [*words, "-sS", "--fail-with-body"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert '"error"' not in done.stdout
        if '"stream": true' in line:
            assert done.stdout.endswith("data: [DONE]\n\n")


def test_every_variable_is_told_and_no_other() -> None:
    told = set(re.findall(r"`((?:BEHELD|VLLM|OPENAI|LOCAL|SAGEMAKER)_[A-Z0-9_]+)`", ENVIRONMENT))
    known = {"BEHELD_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"}
    for name, rest in env.TABLE.items():
        known |= {name, *rest[:-1]}
    assert told == known


@pytest.mark.parametrize("limit", [field.name for field in fields(MediaLimits)])
def test_limits_on_media_are_told_with_their_defaults(limit: str) -> None:
    default = getattr(MediaLimits(), limit)
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    if isinstance(default, Mapping):
        shown = ", ".join(f"{modality} {seconds:g}" for modality, seconds in default.items())
    assert f"\n| `{limit}` | {shown} |" in SERVER
