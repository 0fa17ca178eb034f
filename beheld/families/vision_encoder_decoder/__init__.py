"""Donut, Nougat and TrOCR: a tower over a page or a line of text, and a decoder of BART's kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.config import KVGroup
from beheld.families._shared.joined.config import check_parts, start_of
from beheld.families.family import IMAGE, Family, KnownCheckpoint, decoder_group

_ENCODERS = ("donut-swin", "swin", "vit", "deit")


def states_of(encoder: Mapping[str, Any], height: int, width: int) -> int:
    """Return how many states the tower makes of an image.

    Swin has a state for each of its patches, of which each further stage halves rows and columns. Other towers have one
    for each patch and one for each token of their own.
    """
    kind = encoder["model_type"]
    if "swin" not in kind:
        size = encoder.get("patch_size", 16)
        return (height // size) * (width // size) + (2 if kind == "deit" else 1)
    made = 1
    for pixels in (height, width):
        side = -(-pixels // encoder.get("patch_size", 4))
        for _ in encoder.get("depths", (2, 2, 6, 2))[1:]:
            side = -(-side // 2)
        made *= side
    return made


def _cross_group(config: Any) -> KVGroup:
    """Return one cross group: every decoder layer attends to the tower's states.

    Raises:
        ModelError: a part is of another type.
    """
    check_parts(config, "VisionEncoderDecoderModel", _ENCODERS)
    size = config.encoder.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return decoder_group(config.decoder, "cross", states_of(config.encoder.to_dict(), height, width))


FAMILY = Family(
    model_types=("vision-encoder-decoder",),
    tested=(
        KnownCheckpoint(
            "vision-encoder-decoder",
            "VisionEncoderDecoderModel",
            "naver-clova-ix/donut-base-finetuned-docvqa",
            IMAGE,
            "Donut, Nougat and TrOCR: one page or line per prompt, and the prompt begins the answer",
            one_image=True,
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"image": start_of(config)},
    encoder_reads="image",
    kv_groups=lambda config: (decoder_group(config.decoder, "full"),),
    cross_group=_cross_group,
)
