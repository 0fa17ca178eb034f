"""Ultravox."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("ultravox",),
    architectures=("UltravoxModel",),
    undefined=Undefined("UltravoxModel", "fixie-ai/ultravox-v0_5-llama-3_2-1b", "a Whisper encoder before Llama"),
)
