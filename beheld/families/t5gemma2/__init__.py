"""T5Gemma 2: an encoder reads the prompt; decoder layers attend to its states and to the answer at once."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.core.errors import ModelError
from beheld.families.family import IMAGE, Family, KnownCheckpoint, decoder_group

# Of a prompt. An item's states take memory next to the answers' keys and values, so each must have its room.
_MOST_STATES = 8192


def _cross_group(config: Any) -> KVGroup:
    """Return one cross group: every decoder layer attends to the encoder's states.

    Raises:
        ModelError: the logits have a soft cap, which no published checkpoint has.
    """
    if config.decoder.final_logit_softcapping is not None:
        raise ModelError("T5Gemma 2 with a soft cap of its logits cannot be run yet.", "Use a published checkpoint.")
    reach = config.encoder.text_config.max_position_embeddings
    return decoder_group(config.decoder, "cross", min(reach, _MOST_STATES))


FAMILY = Family(
    model_types=("t5gemma2",),
    tested=(
        KnownCheckpoint(
            "t5gemma2",
            "T5Gemma2ForConditionalGeneration",
            "google/t5gemma-2-1b-1b",
            IMAGE,
            f"an encoder reads the prompt, of at most {_MOST_STATES} tokens with those of its images",
            by_census=True,
        ),
    ),
    encoder_reads="prompt",
    cross_group=_cross_group,
    plain_attention="its layers attend to positions and to an encoder's states by one softmax",
)
