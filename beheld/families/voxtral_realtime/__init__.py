"""Voxtral Realtime, which cannot run: each token is embedded with what is heard at its time."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("voxtral_realtime",),
    refused="what is heard is added to the embedding of every token of its answer, too, and items here have embeddings "
    "in the prompt alone",
)
