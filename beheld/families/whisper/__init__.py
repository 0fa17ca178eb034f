"""Whisper: an encoder hears 30 seconds of audio, and a decoder writes the words, and timestamps."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import AUDIO, Family, KnownCheckpoint, ShortName, decoder_group


def _placeholders(config: Any) -> dict[str, int]:
    """Return the token that starts every transcript: the audio belongs there, and the token stays."""
    return {"audio": config.decoder_start_token_id}


def _cross_group(config: Any) -> KVGroup:
    """Return the cross group: every decoder layer attends to all states of a window, filled up if it is shorter."""
    return decoder_group(config, "cross", config.max_source_positions)


FAMILY = Family(
    model_types=("whisper",),
    short_names=(
        ShortName("whisper-small", "openai/whisper-small", "whisper", "Apache-2.0", 0.24, "speech to text on a laptop"),
        ShortName("whisper-large-v3-turbo", "openai/whisper-large-v3-turbo", "whisper", "MIT", 0.8, "speech to text"),
    ),
    tested=(
        KnownCheckpoint(
            "whisper",
            "WhisperForConditionalGeneration",
            "openai/whisper-large-v3-turbo",
            AUDIO,
            "an encoder hears one audio of up to 30 s per prompt; longer audio is transcribed in windows; language, "
            "task and timestamps by Whisper's rules; times of words; no beams",
        ),
    ),
    placeholders=_placeholders,
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config, "full"),),
    cross_group=_cross_group,
)
