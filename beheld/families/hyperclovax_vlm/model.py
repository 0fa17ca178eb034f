"""The model of HyperCLOVA X SEED Vision as the engine runs it: its tower reads sizes and counts as numbers."""

from __future__ import annotations

from beheld.families.model import FamilyModel

_PARTS = ("model.vision_model", "model.mm_projector")

MODEL = FamilyModel(
    host_features=frozenset(("image_sizes", "video_canvas_tiles", "video_num_canvases")),
    towers={"image": _PARTS, "video": _PARTS},
)
