"""Qwen4-Exp, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("qwen4_exp", "qwen4_exp_text"),
    refused=(
        "an indexer chooses the blocks of positions that its attention layers see, hyper-connections carry several "
        "residual streams between its layers, and some layers embed hashed n-grams of the last tokens, which no group "
        "of the cache keeps; none of the three is computed here yet (its gated delta net is)"
    ),
)
