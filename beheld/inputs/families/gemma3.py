"""Gemma 3: `<start_of_image>` in a prompt becomes a block of embeddings between blank lines, crops with words."""

from __future__ import annotations

from beheld.inputs.families import Family

FAMILY = Family(
    places={"image": "<start_of_image>"},
    embedded={"image": ("\n\n<start_of_image>", "<end_of_image>\n\n")},
)
