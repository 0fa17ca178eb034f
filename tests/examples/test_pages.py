"""What the pages of the documentation show is true: commands parse, examples exist, the README runs as it stands."""

from __future__ import annotations

import ast
import builtins
import re
import shlex
import socket
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from beheld.cli.main import build_parser, main
from beheld.server.metrics import Metrics
from tests.examples import follow, pictures
from tests.long import LONG

DOCS = follow.ROOT / "docs"
README = follow.ROOT / "README.md"
CONTRIBUTING = follow.ROOT / "CONTRIBUTING.md"
HOUSE = follow.ROOT / "beheld"
TOP = ("beheld", "tests", "docs", "benchmarks", "training", "examples", "docker")
PAGES = [README, DOCS / "index.md", DOCS / "getting-started.md", *sorted((DOCS / "how-to").glob("*.md"))]


def name(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=name)
def test_every_command_is_one(page: Path) -> None:
    """Those that are shown and not run, too."""
    for block in follow.blocks(page):
        if block.language not in ("bash", "sh"):
            continue
        for text in follow.commands(block):
            for line in re.split(r" \| | && ", text.replace("\\\n", " ")):
                words = shlex.split(re.sub(r" > \S+$", "", line), comments=True)
                words = list(dropwhile(lambda word: re.fullmatch(r"\w+=\S*", word), words))
                if words[:1] == ["beheld"]:
                    build_parser().parse_args(words[1:])
                elif words[:1] == ["python"] and words[1].endswith(".py"):
                    assert (follow.ROOT / words[1]).is_file(), line
                elif words[:2] == ["python", "-m"] and words[2].startswith(("benchmarks", "tests")):
                    assert find_spec(words[2]) is not None, line
                elif words[:1] == ["pytest"]:
                    paths = [word for word in words[1:] if word.startswith("tests")]
                    assert all((follow.ROOT / path).exists() for path in paths), line


@pytest.mark.parametrize("page", [*PAGES, *sorted((DOCS / "explanation").glob("*.md")), CONTRIBUTING], ids=name)
def test_files_that_are_named_are_there(page: Path) -> None:
    """`scheduler/scheduler.py` stands for the file in the package, `tests/tiny.py` for one in the repository."""
    for span in re.findall(r"`([\w./*<>-]+/[\w./*<>-]*)`", page.read_text(encoding="utf-8")):
        top = span.split("/")[0]
        if "<" in span or not top or not (top in TOP or (HOUSE / top).is_dir()):
            continue
        pattern = span.rstrip("/")
        found = [*HOUSE.glob(pattern), *follow.ROOT.glob(pattern)]
        assert found or (pattern.startswith("build/")), f"{page.name} names {span}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_compiles(page: Path) -> None:
    for block in follow.blocks(page):
        if block.language == "python" and not block.included:
            compile(block.text, f"{page.name}:{block.line}", "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_that_is_run_defines_what_it_uses(page: Path) -> None:
    """A block that is copied alone runs, too."""
    for block in follow.blocks(page):
        if block.language == "python" and not block.included:
            nodes = list(ast.walk(ast.parse(block.text)))
            known = {
                alias.asname or alias.name.split(".")[0]
                for node in nodes
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            known |= {
                node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            }
            known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            known |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
            names = [node for node in nodes if isinstance(node, ast.Name)]
            known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            unknown = {node.id for node in names} - known - set(dir(builtins))
            assert not unknown, f"{page.name}:{block.line} uses {sorted(unknown)}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_models_of_commands_that_are_run_have_tiny_ones(page: Path) -> None:
    """A page cannot be followed where a hub name stands for nothing."""
    for block in follow.blocks(page):
        if block.language in ("bash", "python") and not block.included:
            found = re.findall(
                r"""(?<![\w/.:-])([A-Za-z][\w.-]*/[\w.-]*\d+(?:\.\d+)?[BM]\b[\w.-]*)""", follow.stand_ins(block.text)
            )
            # GGUF files lie where the page is followed.
            assert {name for name in found if not name.endswith(".gguf")} <= set(follow.REPOSITORIES), (
                f"{page.name}:{block.line}"
            )


def test_parts_of_files_are_shown_as_such() -> None:
    """A formatter took the marks of included files for code once."""
    for page in DOCS.rglob("*.md"):
        for line in page.read_text(encoding="utf-8").splitlines():
            assert "8 <" not in line or line.startswith("|"), f"{page.name}: {line}"
            if "8<--" in line:
                assert re.fullmatch(r'--8<-- "[\w./-]+(:\w+)?"', line), f"{page.name}: {line}"


class _Tags(yaml.SafeLoader):
    """Reads what is tagged with a function of Python as nothing."""


_Tags.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def _leaves(nav: Any) -> set[str]:
    """The pages of a part of the site's navigation."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav
    return set().union(*map(_leaves, parts))


def test_there_are_pages_enough_and_all_are_listed() -> None:
    pages = [page for page in (DOCS / "how-to").glob("*.md") if page.name != "index.md"]
    assert len(pages) >= 20
    listed = (DOCS / "how-to" / "index.md").read_text(encoding="utf-8")
    site = _leaves(yaml.load((follow.ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Tags)["nav"])
    assert {name for name in site if not (DOCS / name).exists()} == set(), (
        "what is no page, two in one line for example"
    )
    for page in pages:
        assert f"({page.name})" in listed, f"docs/how-to/index.md does not list {page.name}"
        assert f"how-to/{page.name}" in site, f"mkdocs.yml does not list {page.name}"


def test_a_page_is_not_followed_with_another_programs_server(tmp_path: Path) -> None:
    """Its answers were taken for those of the page's own, which could not listen."""
    with socket.create_server(("127.0.0.1", 0)) as other, ExitStack() as stack:
        port = other.getsockname()[1]
        block = follow.Block("bash", f"beheld serve --port {port}\n", 1)
        with pytest.raises(AssertionError, match=f"another program listens at port {port}"):
            follow.Walk(tmp_path, stack).run(block)


def test_the_readme_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, where a user's shell would start one for each line; servers are tests/server's."""
    follow.furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BEHELD_LOG_LEVEL", "WARNING")
    for block in follow.blocks(README):
        text = follow.stand_ins(block.text)
        if block.language == "python":
            exec(compile(text, f"README.md:{block.line}", "exec"), {"__name__": "__main__"})
        elif block.language == "bash":
            for command in follow.commands(follow.Block("bash", text, block.line)):
                words = shlex.split(command.split(" && ")[-1], comments=True)
                if words[0] == "beheld" and words[1] not in ("serve", "chat", "bench"):
                    assert main(words[1:]) == 0, command
    out = capsys.readouterr().out
    assert out.count("A large red circle at the top left") >= 2


def test_the_page_of_metrics_lists_all_and_no_other() -> None:
    shown = Metrics().text(None, 0).decode()
    kinds = {found[0]: found[1] for found in re.findall(r"^# TYPE (\w+) (\w+)$", shown, re.MULTILINE)}
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    listed = {found[0]: found[1] for found in re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE)}
    assert listed == {metric: kind for metric, kind in kinds.items() if not metric.endswith("_created")}
    named = set(re.findall(r"^# TYPE (vllm:\w+) \w+$", shown, re.MULTILINE))
    told = set(re.findall(r"`(vllm:\w+)`", page))
    assert told == {metric for metric in named if not metric.endswith("_created")}


@pytest.mark.parametrize("name", list(pictures.PICTURES))
def test_pictures_show_what_beheld_answers(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    kept = pictures.FOLDER / f"{name}.svg"
    assert kept.read_text(encoding="utf-8") == drawn, "write them anew: python -m tests.examples.pictures"
    named = [page for page in PAGES if f"(pictures/{name}.svg)" in page.read_text(encoding="utf-8")]
    assert len(named) == 1


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="the long form: BEHELD_LONG=1")
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_page_can_be_followed(page: Path) -> None:
    if any(block.text.startswith("ray ") for block in follow.blocks(page) if block.language == "bash"):
        pytest.importorskip("ray")
    follow.follow(page)
