"""InstructBLIP: learned queries read an image, or the frames of a video, together with the prompt's words."""

from __future__ import annotations

from beheld.families.family import IMAGE, VIDEO, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("instructblip", "instructblipvideo"),
    tested=(
        KnownCheckpoint(
            "instructblip",
            "InstructBlipForConditionalGeneration",
            "Salesforce/instructblip-vicuna-7b",
            IMAGE,
            "one image, before the prompt, read together with its words; no T5",
            one_image=True,
            by_census=True,
        ),
        KnownCheckpoint(
            "instructblipvideo",
            "InstructBlipVideoForConditionalGeneration",
            "Salesforce/instructblip-vicuna-7b",
            VIDEO,
            "one video, before the prompt, each frame read together with the words; trained with four frames "
            "(`num_frames`); no T5",
            by_census=True,
        ),
    ),
    reference=ReferenceOptions(text_model_alone=True),
)
