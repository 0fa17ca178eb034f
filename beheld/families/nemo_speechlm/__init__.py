"""Nemotron 3.5 Transcribe: an encoder of speech and one of speakers before Nemotron-H."""

from __future__ import annotations

from beheld.families.family import AUDIO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers
from beheld.families.nemotron_h import state_of

FAMILY = Family(
    model_types=("nemo_speechlm",),
    tested=(
        KnownCheckpoint(
            "nemo_speechlm",
            "Nemotron3_5TranscribeForConditionalGeneration",
            "nvidia/NVIDIA-Nemotron-3.5-Transcribe-30B-A4B",
            AUDIO,
            "transcripts with speakers, as the model writes them; Mamba-2, attention, MLPs and experts in turn; no "
            "times of words",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.22", UNDEFINED),
    state=state_of,
    reasoning=("think",),
)
