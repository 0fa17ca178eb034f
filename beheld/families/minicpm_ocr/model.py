"""MiniCPM-OCR: MiniCPM-V 4.6's mixers and slices."""

from __future__ import annotations

from beheld.families.minicpmv4_6.model import MODEL

__all__ = ["MODEL"]
