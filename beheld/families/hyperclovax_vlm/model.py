"""The model of HyperCLOVA X SEED Vision as the engine runs it: its tower reads sizes and counts as numbers."""

from __future__ import annotations

from beheld.families.model import FamilyModel

_PARTS = ("model.vision_model", "model.mm_projector")

MODEL = FamilyModel(
    host_features=frozenset(("image_sizes", "video_canvas_tiles", "video_num_canvases")),
    towers={"image": _PARTS, "video": _PARTS},
    # Of a tower that ends before its last layer, or has no norm and no head.
    unused_weights=(
        "vision_model.vision_model.encoder.layers.",
        "vision_model.vision_model.head.",
        "vision_model.vision_model.post_layernorm.",
    ),
)
