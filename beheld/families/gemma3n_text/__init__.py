"""Gemma 3n, text only: per-layer embeddings; layers that read other layers' caches."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(model_types=("gemma3n_text",))
