"""Speech2Text: convolutions and an encoder over mel features, and a decoder with sinusoidal positions."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group

# Frames of a state, with the two convolutions of published checkpoints.
_FRAMES = 4

FAMILY = Family(
    model_types=("speech_to_text",),
    tested=(
        KnownCheckpoint(
            "speech_to_text",
            "Speech2TextForConditionalGeneration",
            "facebook/s2t-small-librispeech-asr",
            AUDIO,
            "an encoder hears one audio per prompt; longer audio is transcribed in windows",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": config.decoder_start_token_id},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config, "full"),),
    cross_group=lambda config: decoder_group(config, "cross", config.max_source_positions // _FRAMES),
)
