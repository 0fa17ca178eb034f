"""InstructBLIP, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("instructblip", "instructblipvideo"),
    refused="its Q-Former reads the question with the image, and an image is processed here without its prompt",
)
