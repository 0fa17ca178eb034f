"""Muse Spark: Muse Glimmer's prompts."""

from __future__ import annotations

from beheld.families.muse_glimmer.inputs import INPUTS

__all__ = ["INPUTS"]
