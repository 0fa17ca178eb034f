"""Models with T5's decoder, which cannot run: its scores have a bias by the distance of two positions."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("pix2struct", "udop", "pop2piano"),
    refused="its decoder adds a learned bias to each score, by the distance of the two positions, and attention here "
    "takes none",
)
