"""Pix2Struct: patches of an image in its own proportions, an encoder, and T5's decoder."""

from __future__ import annotations

from beheld.families._shared.t5.config import BIASED, t5_group
from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("pix2struct",),
    tested=(
        KnownCheckpoint(
            "pix2struct",
            "Pix2StructForConditionalGeneration",
            "google/pix2struct-textcaps-base",
            IMAGE,
            "an encoder reads one image per prompt, and the prompt begins the answer; checkpoints that answer "
            "questions take the question as the image's option `header_text`, which is drawn above it",
            one_image=True,
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"image": config.text_config.decoder_start_token_id},
    encoder_reads="image",
    kv_groups=lambda config: (t5_group(config.text_config, "full", config.text_config.num_layers),),
    cross_group=lambda config: t5_group(
        config.text_config, "cross", config.text_config.num_layers, config.vision_config.seq_len
    ),
    plain_attention=BIASED,
)
