"""Moonshine Streaming: an encoder that hears a little ahead only, and Moonshine's decoder."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group
from beheld.families.moonshine import kv_groups

FAMILY = Family(
    model_types=("moonshine_streaming",),
    tested=(
        KnownCheckpoint(
            "moonshine_streaming",
            "MoonshineStreamingForConditionalGeneration",
            "UsefulSensors/moonshine-streaming-tiny",
            AUDIO,
            "an encoder hears one whole audio per prompt; longer audio is transcribed in windows",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": config.decoder_start_token_id},
    encoder_reads="audio",
    kv_groups=kv_groups,
    # The decoder has a position for each state.
    cross_group=lambda config: decoder_group(config, "cross", config.max_position_embeddings),
)
