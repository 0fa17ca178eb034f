"""DiffusionGemma, which cannot be run."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("diffusion_gemma",),
    refused="it denoises blocks of tokens and does not answer token by token",
)
