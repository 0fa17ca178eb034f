"""SeamlessM4T: speech to text in a language that the prompt names; what reads or speaks is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.family import AUDIO, Convert, Family, KnownCheckpoint, decoder_group

# States of about ten minutes.
_MOST_STATES = 4096
_NOTE = (
    "an encoder hears one audio per prompt, which names the answer's language (`__eng__`); no text and no speech "
    "is made of text"
)


def _hearing(kind: str, whole: str, part: str) -> Convert:
    """Return what lets the part that hears be made of a checkpoint of the whole model."""

    def convert(content: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        return (kind, {**content, "architectures": [part]}) if content.get("architectures") == [whole] else None

    return convert


FAMILY = Family(
    model_types=("seamless_m4t", "seamless_m4t_v2"),
    tested=(
        KnownCheckpoint(
            "seamless_m4t",
            "SeamlessM4TForSpeechToText",
            "facebook/hf-seamless-m4t-medium",
            AUDIO,
            _NOTE,
            by_census=True,
        ),
        KnownCheckpoint(
            "seamless_m4t_v2",
            "SeamlessM4Tv2ForSpeechToText",
            "facebook/seamless-m4t-v2-large",
            AUDIO,
            _NOTE,
            by_census=True,
        ),
    ),
    convert={
        "seamless_m4t": _hearing("seamless_m4t", "SeamlessM4TModel", "SeamlessM4TForSpeechToText"),
        "seamless_m4t_v2": _hearing("seamless_m4t_v2", "SeamlessM4Tv2Model", "SeamlessM4Tv2ForSpeechToText"),
    },
    placeholders=lambda config: {"audio": config.decoder_start_token_id},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config, "full"),),
    cross_group=lambda config: decoder_group(config, "cross", _MOST_STATES),
)
