"""VibeVoice, which cannot be run: it speaks."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("vibevoice",),
    refused="it writes speech, and no text; vibevoice_asr, which transcribes, runs",
)
