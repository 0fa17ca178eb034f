"""InternVL in its publisher's layout, as InternVL2 and InternVL3: InternViT, a projector, InternLM2 or Qwen."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("internvl_chat",),
    architectures=("InternVLChatModel",),
    tested=(
        KnownCheckpoint(
            "internvl_chat",
            "InternVLChatModel",
            "OpenGVLab/InternVL2-2B",
            IMAGE,
            "tiles, InternLM2 text; its tokenizer needs the package sentencepiece; another language model than "
            "InternLM2, Qwen2 and Qwen3 is refused",
        ),
        KnownCheckpoint(
            "internvl_chat_qwen2", "InternVLChatModel", "OpenGVLab/InternVL3-2B", IMAGE, "tiles, Qwen2 text"
        ),
    ),
    definition=Definition(config="config:InternChatConfig", model="modeling:InternChatForConditionalGeneration"),
    placeholder_tokens={"image": "<IMG_CONTEXT>"},
    calls=("internlm", "hermes"),
    reasoning=("think",),
    grounding=Grounding("ref box", 1000),
)
