"""Qwen-VL and Qwen-VL-Chat: a ViT-bigG tower whose features 256 queries read, before Qwen-1's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint, ReferenceOptions

# `<img>` follows 205 unused tokens and those of boxes, which follow <|im_start|> and <|im_end|>.
_IM_START, _IM_END = -213, -212


def _ends(config: Any, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of ChatML at which the published code ends the answers of a chat model."""
    if generation.get("chat_format") != "chatml":
        return ()
    start = config.image_token_id - 2
    return start + _IM_START, start + _IM_END


FAMILY = Family(
    model_types=("qwen",),
    architectures=("QWenLMHeadModel", "QwenVLForConditionalGeneration"),
    tested=(
        KnownCheckpoint(
            "qwen_vl",
            "QWenLMHeadModel",
            "Qwen/Qwen-VL",
            IMAGE,
            "tokenizer file qwen.tiktoken; up to the 2,048 positions of seq_length, beyond which the published code "
            "scales rotary positions and queries; Qwen-1 without images is refused",
            on_gpu=True,
        ),
        KnownCheckpoint(
            "qwen_vl_chat",
            "QWenLMHeadModel",
            "Qwen/Qwen-VL-Chat",
            IMAGE,
            "as qwen_vl; answers end at the tokens of ChatML",
        ),
    ),
    definition=Definition(config="config:QwenVLConfig", model="modeling:QwenVLForConditionalGeneration"),
    ends=_ends,
    reference=ReferenceOptions(merges_inside=True),
    grounding=Grounding("ref box", 1000),
)
