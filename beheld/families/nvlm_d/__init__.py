"""NVLM-D: InternViT-6B, a projector of its own and Qwen2; tags in the text number an image's tiles."""

from __future__ import annotations

from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("NVLM_D",),
    architectures=("NVLM_D",),
    tested=(KnownCheckpoint("nvlm_d", "NVLM_D", "nvidia/NVLM-D-72B", IMAGE, "tiles, each after a tag in the text"),),
    definition=Definition(config="config:NVLMConfig", model="modeling:NVLMForConditionalGeneration"),
    placeholder_tokens={"image": "<|vision_pad|>"},
)
