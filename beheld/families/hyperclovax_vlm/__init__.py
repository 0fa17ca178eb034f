"""HyperCLOVA X SEED Vision: SigLIP and a C-Abstractor before Llama; nine frames of a video share a canvas."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("hyperclovax_vlm",),
    architectures=("HCXVisionForCausalLM",),
    tested=(
        KnownCheckpoint(
            "hyperclovax_vlm",
            "HCXVisionForCausalLM",
            "naver-hyperclovax/HyperCLOVAX-SEED-Vision-Instruct-3B",
            IMAGE_AND_VIDEO,
            "tiles of an image; more embeddings for the first of nine frames",
        ),
    ),
    definition=Definition(config="config:HyperclovaxConfig", model="modeling:HyperclovaxForConditionalGeneration"),
)
