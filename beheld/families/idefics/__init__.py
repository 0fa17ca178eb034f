"""IDEFICS: gated layers between those of the text attend to images."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import IMAGE, Family, KnownCheckpoint


def _cross_group(config: Any) -> KVGroup:
    """Return the gated layers, each by the number of the text's layer that follows it."""
    vision, heads = config.vision_config, config.num_attention_heads
    if config.use_resampler:
        states = config.perceiver_config.resampler_n_latents
    else:
        states = (vision.image_size // vision.patch_size) ** 2 + 1
    head_dim = config.hidden_size // heads
    # The last layers may be too few for another one.
    count = config.num_hidden_layers // config.cross_layer_interval
    layers = tuple(number * config.cross_layer_interval for number in range(count))
    return KVGroup("cross", layers, heads, head_dim, head_dim, num_states=states)


FAMILY = Family(
    model_types=("idefics",),
    tested=(
        KnownCheckpoint(
            "idefics",
            "IdeficsForVisionText2Text",
            "HuggingFaceM4/idefics-9b-instruct",
            IMAGE,
            "gated layers attend to the last image before a token; no prompt with `</s>` and an image",
            by_census=True,
        ),
    ),
    placeholder_tokens={"image": "<image>"},
    # The tokens of images have a table and a head of their own.
    head_size=lambda config: config.vocab_size + config.additional_vocab_size,
    cross_group=_cross_group,
)
