"""UDOP: an encoder reads a question, a page's words at their places and its patches; T5's decoder answers."""

from __future__ import annotations

from beheld.families._shared.t5.config import BIASED, t5_group
from beheld.families.family import IMAGE, Family, KnownCheckpoint

# Of a question, a page's words and its patches. Positions are relative, so only memory bounds them.
_MOST_STATES = 4096

FAMILY = Family(
    model_types=("udop",),
    tested=(
        KnownCheckpoint(
            "udop",
            "UdopForConditionalGeneration",
            "microsoft/udop-large",
            IMAGE,
            "an encoder reads a question and one page, whose words and places (0 to 1000) are the options `words` and "
            "`boxes` of the image; without them pytesseract reads it, if the checkpoint says so",
            one_image=True,
            by_census=True,
        ),
    ),
    # It stands for the patches of a page, which follow its words.
    placeholders=lambda config: {"image": config.pad_token_id},
    encoder_reads="prompt",
    kv_groups=lambda config: (t5_group(config, "full", config.num_decoder_layers),),
    cross_group=lambda config: t5_group(config, "cross", config.num_decoder_layers, _MOST_STATES),
    plain_attention=BIASED,
)
