"""PP-Chart2Table: GOT-OCR's tower."""

from __future__ import annotations

from beheld.families.got_ocr2.model import MODEL

__all__ = ["MODEL"]
