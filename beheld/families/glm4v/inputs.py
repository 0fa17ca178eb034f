"""GLM-4.1V to GLM-4.6V: a video is its frames as images, each followed by its time."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

INPUTS = FamilyInputs(
    placeholders={
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": "<|begin_of_video|><|video|><|end_of_video|>",
    },
    embedded_as={"video": "image"},
    embedded={"video": LAID_OUT},
    frame_rate="the prompt contains each frame's time",
)
