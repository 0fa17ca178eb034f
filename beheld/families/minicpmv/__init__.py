"""MiniCPM-V up to 2.6."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("minicpmv",),
    architectures=("MiniCPMV",),
    undefined=Undefined("MiniCPMV", "openbmb/MiniCPM-V-2_6", "a resampler with two-axis positions, sliced images"),
)
