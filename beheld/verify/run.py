"""One verification: both sides, one after the other, and their comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

from beheld.core.config import EngineArgs
from beheld.verify import ours, reference
from beheld.verify.compare import Stage, compare, first_difference
from beheld.verify.trace import Question


def verify(args: EngineArgs, question: Question) -> tuple[list[Stage], Stage | None]:
    """All stages, and the first that differs; both sides compute on the CPU.

    Raises:
        BeheldError: a side cannot answer at all.
    """
    dtype = "float32" if args.dtype == "auto" else args.dtype
    args = dataclasses.replace(args, dtype=dtype, device="cpu")
    theirs = reference.trace(args, question)
    mine = ours.trace(args, question)
    stages = compare(theirs, mine)
    return stages, first_difference(stages)


def made_up(count: int) -> list[Any]:
    """Pictures of coloured noise with a shape in them, always the same; no two alike."""
    import numpy as np
    from PIL import Image, ImageDraw

    made = []
    for index in range(count):
        noise = np.random.default_rng(index).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((160, 120), Image.Resampling.BILINEAR)
        ImageDraw.Draw(image).ellipse((20 + 30 * index, 20, 90 + 30 * index, 90), fill=(220, 40, 40))
        made.append(image)
    return made
