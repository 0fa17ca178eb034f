"""NVLM-D: `<image>` in the text becomes tiles, each after a tag that is ordinary text.

The last one, an overview of the whole or the only tile, has a tag of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.families._shared.intern.inputs import look
from beheld.families.inputs import LAID_OUT, FamilyInputs


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families._shared.intern.processing import with_tiles
    from beheld.families.nvlm_d.processing import TagProcessor

    return with_tiles(path, whole=TagProcessor)


INPUTS = FamilyInputs(
    load=load,
    added=("<image>",),
    places={"image": "<image>"},
    placeholders={"image": "<image>\n"},
    embedded={"image": LAID_OUT},
    looks={"image": look},
)
