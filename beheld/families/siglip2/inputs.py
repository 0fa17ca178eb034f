"""A prompt is a text, or an image."""

from __future__ import annotations

from beheld.families._shared.contrastive.inputs import INPUTS

__all__ = ["INPUTS"]
