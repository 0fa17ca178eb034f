"""docs/explanation/models-of-examples.md: each model of vLLM's examples has a row in the oracle."""

from __future__ import annotations

from pathlib import Path

from beheld.checkpoint.files import read_json
from beheld.families import page, registry
from tests import tiny, tiny_new
from tests.compat import documents
from tests.reference.test_recorded import FAMILIES, recorded

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "models-of-examples.md"
TABLES = [
    [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")][1:]
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
]
OWN, THEIRS = ({row[0]: row[1:] for row in table} for table in TABLES)


def test_the_keys_are_those_of_the_documents() -> None:
    assert (len(OWN), len(THEIRS), len(OWN.keys() | THEIRS.keys())) == (18, 27, 45)
    named = {key for number in ("000", "001", "002", "003") for key in documents.keys(number)}
    assert named <= OWN.keys() | THEIRS.keys()


def test_each_has_a_row_in_the_oracle() -> None:
    told = {row[1] for row in OWN.values()} | {row[0] for row in THEIRS.values()}
    rows = {row.name: row for row in page.tested() if not row.by_census}
    assert told <= rows.keys() & (set(tiny.TINY) | set(tiny_new.ABSENT_FAMILIES) | set(tiny.APART))


def test_those_defined_here_name_what_they_were_compared_with() -> None:
    for key, (_, family, compared, needed, differs) in OWN.items():
        found = recorded(family)
        reference = found["reference"] if found["reference"].startswith("vLLM") else "its published code"
        assert compared == f"{reference}, transformers {found['transformers']}", key
        assert family in FAMILIES, key
        assert _defined_here(family), key
        assert needed, key
        assert differs, key
    assert not set(FAMILIES) & {row[0] for row in THEIRS.values()}


def _defined_here(name: str) -> bool:
    content = read_json(tiny.checkpoint(name) / "config.json")
    package = registry.find(content.get("model_type"), content.get("architectures", ()))
    return bool(package) and registry.facts(package).definition is not None
