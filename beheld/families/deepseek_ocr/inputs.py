"""DeepSeek-OCR: `<image>` in a plain text becomes tiles and an overview.

Its card has vLLM ban what would repeat 30 of the answer's last 90 tokens, but for the ends of a table's cells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.core.repetition import NoRepeatWindow
from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.deepseek_ocr.processing import load as load_own

    return load_own(path)


def read_tokenizer(path: Path) -> Any:
    """Make the checkpoint's tokenizer; see FamilyInputs.read_tokenizer."""
    from beheld.families._shared.deepseek.processing import read_tokenizer as read

    return read(path)


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return an image's effective size; see FamilyInputs.looks."""
    found: EffectiveSize = item.part.seen(item.size, item.arguments)
    return found


# `<td>` and `</td>`.
_CELLS = frozenset((128821, 128822))
INPUTS = FamilyInputs(
    load=load,
    read_tokenizer=read_tokenizer,
    template="deepseek_ocr/chat_template.jinja",
    placeholders={"image": "<image>\n"},
    looks={"image": look},
    no_repeat=NoRepeatWindow(30, 90, _CELLS),
)
