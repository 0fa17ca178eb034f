"""BLIP: captions of one image, which every layer of the decoder attends to."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.core.errors import ModelError
from beheld.families.family import IMAGE, Family, KnownCheckpoint, decoder_group

_CLASS = "BlipForConditionalGeneration"


def _cross_group(config: Any) -> KVGroup:
    """Return all layers; an image has a state for each patch and one for the whole.

    Raises:
        ModelError: the class does not write captions.
    """
    names = getattr(config, "architectures", None) or [_CLASS]
    if names[0] != _CLASS:
        raise ModelError(
            f"{names[0]} cannot be run yet: its text is read both ways, together with the image, before it answers.",
            f"Of BLIP's classes, {_CLASS} can.",
        )
    vision = config.vision_config
    return decoder_group(config.text_config, "cross", (vision.image_size // vision.patch_size) ** 2 + 1)


FAMILY = Family(
    model_types=("blip",),
    tested=(
        KnownCheckpoint(
            "blip",
            _CLASS,
            "Salesforce/blip-image-captioning-base",
            IMAGE,
            "captions of one image, which may continue the words of a prompt; no question answering and no retrieval",
            one_image=True,
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"image": config.text_config.bos_token_id},
    kv_groups=lambda config: (decoder_group(config.text_config, "full"),),
    cross_group=_cross_group,
    ends=lambda config, generation: (config.text_config.sep_token_id,),
)
