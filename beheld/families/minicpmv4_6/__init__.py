"""MiniCPM-V 4.6 and 4.7: Qwen3.5's language model with a tower of its own."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("minicpmv4_6", "minicpmv4_7"),
    refused="its language model is Qwen3.5's, which runs, but its images are not prepared here yet",
)
