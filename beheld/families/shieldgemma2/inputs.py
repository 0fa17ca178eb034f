"""ShieldGemma 2: Gemma 3's images."""

from __future__ import annotations

from beheld.families.gemma3.inputs import INPUTS

__all__ = ["INPUTS"]
