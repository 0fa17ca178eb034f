"""Granite Docling: its tower's features also enter the first text layers."""

from __future__ import annotations

from beheld.families._shared import deepstack
from beheld.families.model import FamilyModel

MODEL = FamilyModel(extra_columns=deepstack.Deepstack)
