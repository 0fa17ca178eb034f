"""GLM-ASR: an audio encoder in windows before Llama."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("glmasr",),
    tested=(
        KnownCheckpoint(
            "glmasr",
            "GlmAsrForConditionalGeneration",
            "zai-org/GLM-ASR-Nano-2512",
            AUDIO,
            "windows of 30 s; reads the first 655 s of an audio",
        ),
    ),
)
