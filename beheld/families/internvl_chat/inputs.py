"""InternVL: `<image>` in the text becomes tiles between `<img>` and `</img>`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.families._shared.intern.inputs import look
from beheld.families.inputs import FamilyInputs


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families._shared.intern.processing import with_tiles

    return with_tiles(path, read_tokenizer)


def read_tokenizer(path: Path) -> Any:
    """Make InternLM2's tokenizer; None for another, which transformers reads; see FamilyInputs.read_tokenizer."""
    from beheld.families._shared.internlm2.processing import read

    return read(path)


INPUTS = FamilyInputs(
    load=load,
    read_tokenizer=read_tokenizer,
    added=("<image>",),
    places={"image": "<image>"},
    placeholders={"image": "<image>\n"},
    embedded={"image": ("<img>", "</img>")},
    looks={"image": look},
)
