"""Dia, which cannot be run: it speaks."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("dia",),
    refused="it writes speech, and no text",
)
