"""GLM-4V-9B, which shares ChatGLM's model type."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("chatglm",),
    architectures=("GLM4VForCausalLM",),
    undefined=Undefined(
        "GLM4VForCausalLM", "zai-org/glm-4v-9b", "an EVA2-CLIP tower; images at one position", entry="vision_config"
    ),
)
