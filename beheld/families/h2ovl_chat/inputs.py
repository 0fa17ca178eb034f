"""H2OVL: `<image>` in the text becomes tiles between `<img>` and `</img>`; a lone image is processed differently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.families._shared.intern.inputs import look
from beheld.families.inputs import ALONE, FamilyInputs


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families._shared.intern.processing import with_tiles
    from beheld.families.h2ovl_chat.processing import TwoGridImageProcessor

    return with_tiles(path, tiles=TwoGridImageProcessor)


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call."""
    outputs, texts = processor._process_images([item], alone=setting == ALONE, **options)
    return outputs, texts[0]


INPUTS = FamilyInputs(
    load=load,
    call=call,
    counts=frozenset(("image",)),
    added=("<image>",),
    places={"image": "<image>"},
    placeholders={"image": "<image>\n"},
    embedded={"image": ("<img>", "</img>")},
    looks={"image": look},
)
