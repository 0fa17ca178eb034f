"""Moshi, which cannot be run: it speaks."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("moshi",),
    refused="it hears and speaks at once, and its text follows its own speech; kyutai_speech_to_text, which "
    "transcribes, runs",
)
