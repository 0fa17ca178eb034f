"""DeepSeek-VL2: `<image>` in the text becomes an overview and tiles; with more than two images, all are one tile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.families.inputs import WITH_OTHERS, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import numbers

_ADDED = ("<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", "<|User|>", "<|Assistant|>")
_MOST_CUT = 2


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.deepseek_vl_v2.processing import load as load_own

    return load_own(path, _ADDED, _MOST_CUT)


def read_tokenizer(path: Path) -> Any:
    """Make the checkpoint's tokenizer; see FamilyInputs.read_tokenizer."""
    from beheld.families._shared.deepseek.processing import read_tokenizer as read

    return read(path)


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call."""
    outputs, texts = processor._process_images([item], among=setting == WITH_OTHERS, **options)
    return outputs, texts[0]


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return an image's effective size on its canvas of tiles; see FamilyInputs.looks."""
    from beheld.families._shared.deepseek.processing import fitted

    columns, rows = numbers(item.outputs["grids"])
    width, height = fitted(item.size, (columns * item.part.side, rows * item.part.side))
    return EffectiveSize(width, height, 1 + columns * rows)


INPUTS = FamilyInputs(
    load=load,
    read_tokenizer=read_tokenizer,
    call=call,
    counts=frozenset(("image",)),
    few={"image": _MOST_CUT},
    template="deepseek_vl_v2/chat_template.jinja",
    added=_ADDED,
    placeholders={"image": "<image>\n"},
    looks={"image": look},
)
