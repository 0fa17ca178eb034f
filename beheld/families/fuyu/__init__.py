"""Fuyu: an image is rows of patches before the prompt, without a tower."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("fuyu",),
    tested=(
        KnownCheckpoint(
            "fuyu",
            "FuyuForCausalLM",
            "adept/fuyu-8b",
            IMAGE,
            "one image, before the prompt, as rows of patches without a tower; messages cannot be continued",
            one_image=True,
        ),
    ),
)
