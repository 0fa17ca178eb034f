"""Unlimited-OCR, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("unlimited_ocr",),
    refused="its layers see the whole prompt and a window of the answer, which no group of the cache keeps yet",
)
