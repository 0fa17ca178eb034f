"""The scripts in the documents, taken out of them as they stand; the folder of the documents may be absent.

Document 002 is cut off and has lost its line breaks and all that stands between < and >. Its whole form is
examples/offline_inference/vision_language.py of vLLM 0.12.0, in the folder that BEHELD_VLLM_EXAMPLES names.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "seeds"


@cache
def script(number: str) -> str:
    """The script of a document; its test is skipped where the documents are not."""
    found = sorted(FOLDER.glob(f"{number}_*"))
    if not found:
        pytest.skip("the documents are not here")
    content = found[0].read_text(encoding="utf-8")
    if number == "002":
        return _public()
    if number == "000":
        return content.split("```python\n")[1].split("\n```")[0]
    if number == "003":
        return content[content.index('\n"""') + 1 :]
    assert number == "001"
    return "\n".join(_cells(content))


def _public() -> str:
    folder = os.environ.get("BEHELD_VLLM_EXAMPLES")
    if not folder:
        pytest.skip("BEHELD_VLLM_EXAMPLES names no folder of vLLM's examples")
    return (Path(folder) / "vision_language.py").read_text(encoding="utf-8")


def remaining(text: str) -> str:
    """What document 002 keeps of a text."""
    return re.sub(r"\s+", "", re.sub(r"<[^<>|\n]*>|<\|[^<>\n]*\|>", "", text))


def raw(number: str) -> str:
    """A document as it stands."""
    (found,) = FOLDER.glob(f"{number}_*")
    return found.read_text(encoding="utf-8")


def _cells(content: str) -> list[str]:
    """The input cells of the notebook, each up to the heading or the output that follows it."""
    cells = []
    for cell in re.split(r"^In \[\d+\]:\n", content, flags=re.MULTILINE)[1:]:
        ends = r"^#{2,} |^INFO " if not cell.startswith("main(") else r"^$"
        cells.append(re.split(ends, cell, flags=re.MULTILINE)[0])
    return cells


def keys(number: str) -> list[str]:
    """The model keys of a document's script; none where the documents are not."""
    if not list(FOLDER.glob(f"{number}_*")) or (number == "002" and "BEHELD_VLLM_EXAMPLES" not in os.environ):
        return []
    table = script(number).split("model_example_map = {")[1].split("}")[0]
    found = re.findall(r'"([^"]+)": (\w+)', table)
    return [key for key, function in found if number != "002" or f"def {function}(" in raw("002")]


def repository_of(number: str, key: str) -> str:
    """The repository that a key's function names."""
    source = script(number)
    function = re.search(rf'"{re.escape(key)}": (\w+)', source)
    assert function is not None
    body = source.split(f"def {function[1]}(")[1].split("\ndef ")[0]
    name = re.search(r'"([\w.-]+/[\w.-]+)"', body.replace("https://", ""))
    assert name is not None, key
    return name[1]


def urls(number: str) -> list[str]:
    """The addresses of pictures that a script names."""
    return re.findall(r'"(https://upload[^"]+)"', script(number))
