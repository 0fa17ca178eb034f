"""PP-FormulaNet: formulas in LaTeX, written by a decoder after an encoder of images."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import IMAGE, Family, KnownCheckpoint, decoder_group


def _cross_group(config: Any) -> KVGroup:
    """Return all layers; two convolutions halve the patches of each side."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    for _ in range(2):
        side = (side - 1) // 2 + 1
    return decoder_group(config.text_config, "cross", side * side)


FAMILY = Family(
    model_types=("pp_formulanet",),
    tested=(
        KnownCheckpoint(
            "pp_formulanet",
            "PPFormulaNetForConditionalGeneration",
            "PaddlePaddle/PP-FormulaNet_plus-L_safetensors",
            IMAGE,
            "the formula of one image, as the model writes it, without the processor's clean-up of LaTeX",
            one_image=True,
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"image": config.text_config.decoder_start_token_id},
    encoder_reads="image",
    kv_groups=lambda config: (decoder_group(config.text_config, "full"),),
    cross_group=_cross_group,
)
