"""Kyutai's speech to text: each token is embedded with the codes of what is heard at its time."""

from __future__ import annotations

from beheld.families._shared.timeline.config import timeline_group
from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("kyutai_speech_to_text",),
    tested=(
        KnownCheckpoint(
            "kyutai_speech_to_text",
            "KyutaiSpeechToTextForConditionalGeneration",
            "kyutai/stt-2.6b-en-trfs",
            AUDIO,
            "the answer keeps time with one audio, at 12.5 tokens per second, and ends with it; longer audio is "
            "transcribed in windows",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": config.bos_token_id},
    cross_group=lambda config: timeline_group(config.hidden_size, config.max_position_embeddings),
)
