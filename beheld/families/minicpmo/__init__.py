"""MiniCPM-o."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("minicpmo",),
    architectures=("MiniCPMO",),
    undefined=Undefined("MiniCPMO", "openbmb/MiniCPM-o-2_6", "MiniCPM-V's resampler, and a Whisper encoder"),
)
