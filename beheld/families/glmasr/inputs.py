"""GLM-ASR: how it is asked for transcripts."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

INPUTS = FamilyInputs(
    placeholders={"audio": "<|begin_of_audio|><|pad|><|end_of_audio|>"},
    speech=SpeechForm("Please transcribe this audio into text"),
)
