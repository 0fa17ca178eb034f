"""Emu3: its tower reads the sizes of images, which stay on the host."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(host_features=frozenset(("image_sizes",)))
