"""Voxtral Realtime: each token is embedded with what is heard at its time."""

from __future__ import annotations

from beheld.families._shared.timeline.config import timeline_group
from beheld.families.family import AUDIO, Family, KnownCheckpoint

# Ten minutes, at 12.5 tokens per second.
_MOST_STATES = 7500

FAMILY = Family(
    model_types=("voxtral_realtime",),
    tested=(
        KnownCheckpoint(
            "voxtral_realtime",
            "VoxtralRealtimeForConditionalGeneration",
            "mistralai/Voxtral-Mini-4B-Realtime-2602",
            AUDIO,
            "the answer keeps time with one whole audio, at 12.5 tokens per second, and ends with it; no audio that "
            "is still being spoken; without mistral-common",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": config.text_config.bos_token_id},
    cross_group=lambda config: timeline_group(
        config.text_config.hidden_size, min(_MOST_STATES, config.text_config.max_position_embeddings)
    ),
)
