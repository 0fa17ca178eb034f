"""LLaVA-1.5 and LLaVA-NeXT: one `<image>` per picture, and the plain USER/ASSISTANT dialogue of their language model.

A lone LLaVA-NeXT picture has as many tiles as its shape asks for. Its features are kept that way, (1, tiles, 3, height,
width): the padding that a batch would add belongs to the batch, not to the picture.
"""

from __future__ import annotations

from beheld.inputs.families import Family

FAMILY = Family(template="llava")
