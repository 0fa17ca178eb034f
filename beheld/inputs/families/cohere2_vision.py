"""Command A Vision: a prompt says how a picture's tiles lie; their processor's own interface tells the rest."""

from __future__ import annotations

from beheld.inputs.families import LAID_OUT, Family
from beheld.inputs.media.effective_size import stretched_over_tiles

FAMILY = Family(embedded={"image": LAID_OUT}, looks={"image": stretched_over_tiles})
