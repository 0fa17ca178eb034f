"""DeepSeek-VL2: SigLIP over an overview and tiles of an image, before a text with shared and routed experts."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("deepseek_vl_v2",),
    architectures=("DeepseekVLV2ForCausalLM",),
    tested=(
        KnownCheckpoint(
            "deepseek_vl_v2",
            "DeepseekVLV2ForCausalLM",
            "deepseek-ai/deepseek-vl2-tiny",
            IMAGE,
            "an overview and tiles, which a prompt of more than two images does without; experts",
        ),
        KnownCheckpoint(
            "deepseek_vl_v2_small",
            "DeepseekVLV2ForCausalLM",
            "deepseek-ai/deepseek-vl2-small",
            IMAGE,
            "the same with latent attention (MLA); deepseek-vl2, with the experts of DeepSeek-V3, is read and was not "
            "compared",
        ),
    ),
    placeholder_tokens={"image": "<image>"},
    definition=Definition(config="config:DeepseekVLV2Config", model="modeling:DeepseekVLV2ForCausalLM"),
    grounding=Grounding("ref det", 999),
)
