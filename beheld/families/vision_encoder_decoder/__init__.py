"""Any encoder of images before any decoder of text, of those that are known here: TrOCR and Donut are made so."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.core.errors import ModelError
from beheld.families.family import IMAGE, Family, KnownCheckpoint, decoder_group

# Encoder -> its states besides those of patches; a pyramid has none.
_FURTHER = {"vit": 1, "beit": 1, "deit": 2, "donut-swin": 0}
_DECODERS = ("mbart", "trocr")


def _both(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _cross_group(config: Any) -> KVGroup:
    """Return all layers of the decoder, and the number of states that the encoder makes of an image.

    Raises:
        ModelError: one of the two parts is not known here.
    """
    seeing, writing = config.encoder.model_type, config.decoder.model_type
    if seeing not in _FURTHER or writing not in _DECODERS:
        raise ModelError(
            f"{seeing} before {writing} in one model cannot be run yet.",
            f"Encoders can be {', '.join(_FURTHER)}, decoders {', '.join(_DECODERS)}.",
        )
    (height, width), (down, across) = _both(config.encoder.image_size), _both(config.encoder.patch_size)
    # Each stage of a pyramid but the first halves the sides.
    halved = 2 ** (len(config.encoder.depths) - 1) if seeing == "donut-swin" else 1
    patches = (height // down // halved) * (width // across // halved)
    return decoder_group(config.decoder, "cross", patches + _FURTHER[seeing])


FAMILY = Family(
    model_types=("vision-encoder-decoder",),
    tested=(
        KnownCheckpoint(
            "vision-encoder-decoder",
            "VisionEncoderDecoderModel",
            "microsoft/trocr-base-printed",
            IMAGE,
            "one image per prompt; ViT, DeiT, BEiT or Donut's Swin before TrOCR's decoder or MBart's; ViT and TrOCR's "
            "are compared",
            one_image=True,
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"image": first_token(config)},
    encoder_reads="image",
    kv_groups=lambda config: (decoder_group(config.decoder, "full"),),
    cross_group=_cross_group,
)


def first_token(config: Any) -> int:
    """Return the token that starts every answer, which the whole model's configuration may name."""
    own = getattr(config, "decoder_start_token_id", None)
    named = own if own is not None else getattr(config.decoder, "decoder_start_token_id", None)
    if not isinstance(named, int):
        raise ModelError("config.json does not name decoder_start_token_id.", "Add it.")
    return named
