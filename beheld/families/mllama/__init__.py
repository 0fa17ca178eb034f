"""Llama 3.2 Vision: some layers cross-attend to images instead of attending to the text."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import IMAGE, Family, KnownCheckpoint


def _cross_group(config: Any) -> KVGroup | None:
    """Return the layers that attend to images: every tile has one state per patch, and one more."""
    text, vision = config.get_text_config(decoder=True), config.vision_config
    layers = tuple(getattr(text, "cross_attention_layers", None) or ())
    if not layers:
        return None
    states = vision.max_num_tiles * ((vision.image_size // vision.patch_size) ** 2 + 1)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return KVGroup("cross", layers, heads, head_dim, head_dim, num_states=states)


FAMILY = Family(
    model_types=("mllama",),
    tested=(
        KnownCheckpoint(
            "mllama",
            "MllamaForConditionalGeneration",
            "meta-llama/Llama-3.2-11B-Vision-Instruct",
            IMAGE,
            "some layers attend to images instead of the text; a prefix is shared only with the same images",
            on_gpu=True,
        ),
    ),
    cross_group=_cross_group,
    calls=("llama3_json",),
)
