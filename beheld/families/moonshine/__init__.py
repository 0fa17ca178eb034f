"""Moonshine: convolutions over the waveform and an encoder, and a decoder with rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group

# States of the longest audio that is heard at once.
_MOST_STATES = 64 * 16000 // 384


def kv_groups(config: Any) -> tuple[KVGroup, ...]:
    """Return one group, with heads as wide as self-attention fills them up; cross-attention keeps their own size."""
    group, step = decoder_group(config, "full"), config.pad_head_dim_to_multiple_of or 1
    width = -(-group.head_dim // step) * step
    return (replace(group, head_dim=width, value_dim=width),)


FAMILY = Family(
    model_types=("moonshine",),
    tested=(
        KnownCheckpoint(
            "moonshine",
            "MoonshineForConditionalGeneration",
            "UsefulSensors/moonshine-tiny",
            AUDIO,
            "an encoder hears one audio per prompt; longer audio is transcribed in windows",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": config.decoder_start_token_id},
    encoder_reads="audio",
    kv_groups=kv_groups,
    cross_group=lambda config: decoder_group(config, "cross", _MOST_STATES),
)
