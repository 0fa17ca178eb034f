"""MiniCPM-o 2.6: MiniCPM-V 2.6 with Whisper's encoder; what speaks is left out."""

from __future__ import annotations

from beheld.families.family import ALL, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("minicpmo",),
    architectures=("MiniCPMO",),
    tested=(
        KnownCheckpoint(
            "minicpmo",
            "MiniCPMO",
            "openbmb/MiniCPM-o-2_6",
            ALL,
            "answers in text: what speaks is not loaded; version 2.6",
        ),
    ),
    placeholder_tokens={"image": "<unk>", "audio": "<unk>"},
    videos_as_images=True,
    definition=Definition(config="config:MiniCPMOConfig", model="modeling:MiniCPMOForConditionalGeneration"),
    calls=("hermes",),
    reasoning=("think",),
)
