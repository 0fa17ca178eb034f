"""MiniCPM-OCR: MiniCPM-V 4.6's prompts."""

from __future__ import annotations

from beheld.families.minicpmv4_6.inputs import INPUTS

__all__ = ["INPUTS"]
