"""MiniCPM-V 4.7: as 4.6, with positions on a canvas of the image and its slices."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("minicpmv4_7",),
    refused="positions on a canvas of slices are not computed here yet; its language model is Qwen3.5's, which runs",
)
