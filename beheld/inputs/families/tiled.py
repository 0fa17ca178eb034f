"""Families whose prompts say how a picture's tiles or rows lie: Pixtral, Idefics 3.

Their processors' own interface tells all that pictures need.
"""

from __future__ import annotations

from beheld.inputs.families import LAID_OUT, Family

FAMILY = Family(embedded={"image": LAID_OUT})
