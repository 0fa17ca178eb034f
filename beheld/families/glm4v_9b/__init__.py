"""GLM-4V-9B, which shares ChatGLM's model type: an EVA2-CLIP tower before GLM-4; an image takes one position."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("chatglm",),
    architectures=("GLM4VForCausalLM",),
    tested=(
        KnownCheckpoint(
            "glm4v_9b",
            "ChatGLMModel",
            "zai-org/glm-4v-9b",
            IMAGE,
            "the patches of an image share a position; the tokens around them are embeddings of the tower too; "
            "a tiktoken vocabulary; text models of this model type are refused",
            one_image=True,
            on_gpu=True,
        ),
    ),
    definition=Definition(config="config:GLM4VConfig", model="modeling:GLM4VForCausalLM"),
    placeholder_tokens={"image": "<|endoftext|>"},
    reference=ReferenceOptions(merges_inside=True),
    grounding=Grounding("lists", 1000),
)
