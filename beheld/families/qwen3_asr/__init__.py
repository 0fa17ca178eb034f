"""Qwen3-ASR: an audio encoder before Qwen3, which writes the language and then the words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError
from beheld.families.family import AUDIO, Family, KnownCheckpoint


def _refuse_published(raw: Mapping[str, Any]) -> None:
    """Refuse the publisher's own layout, of which transformers' class would read nothing.

    Raises:
        ModelError: config.json is in that layout.
    """
    if "thinker_config" in raw:
        raise ModelError(
            "config.json of the type 'qwen3_asr' has thinker_config: the publisher's own layout, with its forced "
            "aligner, is not read.",
            "Use the checkpoint in transformers' layout, such as Qwen/Qwen3-ASR-1.7B-hf.",
        )


FAMILY = Family(
    model_types=("qwen3_asr",),
    convert={"qwen3_asr": _refuse_published},
    tested=(
        KnownCheckpoint(
            "qwen3_asr",
            "Qwen3ASRForConditionalGeneration",
            "Qwen/Qwen3-ASR-1.7B-hf",
            AUDIO,
            "in transformers' layout; the forced aligner is not run",
        ),
    ),
)
