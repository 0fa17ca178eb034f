"""Kyutai's speech to text, which cannot run: each token is embedded with the codes of what is heard at its time."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("kyutai_speech_to_text",),
    refused="every token of its answer, too, is embedded together with the audio codes of its moment, and items here "
    "have embeddings in the prompt alone",
)
