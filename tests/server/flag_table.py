"""The table of all flags of `beheld serve`, made from what the code says of them.

python -m tests.server.flag_table      writes it into docs/serving.md
"""

from __future__ import annotations

import dataclasses
from typing import Any

from beheld.cli.flags import _SKIPPED
from beheld.cli.meanings import MEANINGS
from beheld.core.config import EngineArgs
from beheld.server.options import ServerOptions
from tests.server.cases import ROOT

PAGE = ROOT / "docs" / "serving.md"
BEGIN = "<!-- made by `python -m tests.server.flag_table` -->\n"
END = "<!-- end of the table -->\n"
# Not fields of anything: they say what is served, and where its engine runs.
OWN = (
    ("`MODEL`, `--model`", "the embedded model", "a folder or a hub name"),
    ("`--config`", "", "a YAML file of options, under the flags' names; flags go first"),
    (
        "`--engine`",
        "process with an NVIDIA GPU, else thread",
        "where the engine runs. On few cores `thread` is faster and starts sooner; a `process` has the interpreter to "
        "itself and can die without the server",
    ),
    ("`--enable-auto-tool-choice`", "always", "known for old scripts"),
)


def shown(default: Any, unit: int = 1) -> str:
    """A default as one would type it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int | float):
        return f"{default / unit:g}"
    return "" if default is None else str(default)


def table() -> str:
    """The table, with its markers."""
    lines = [BEGIN, "| flag | default | meaning |\n", "|---|---|---|\n"]
    rows = list(OWN)
    for field in dataclasses.fields(ServerOptions):
        told = field.metadata
        if "flag" in told:
            default = told.get("shown", shown(field.default, told.get("unit", 1)))
            rows.append((f"`--{told['flag']}`", default, told["meaning"]))
    for field in dataclasses.fields(EngineArgs):
        if field.name not in _SKIPPED:
            words, meaning = MEANINGS[field.name]
            rows.append((f"`--{field.name.replace('_', '-')}`", words or shown(field.default), meaning))
    lines += [f"| {flag} | {default} | {meaning} |\n" for flag, default, meaning in rows]
    return "".join([*lines, END])


def page() -> str:
    """docs/serving.md with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + table() + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
