"""DeepSeek-OCR: `<image>` in a plain text becomes tiles and an overview."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


INPUTS = FamilyInputs(
    load=load,
    read_tokenizer=read_tokenizer,
    template="deepseek_ocr/chat_template.jinja",
    placeholders={"image": "<image>\n"},
    looks={"image": look},
)
