"""Mistral 3: its tower reads image sizes on the host."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(host_features=frozenset(("image_sizes",)))
