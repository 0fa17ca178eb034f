"""MOSS-Transcribe-Diarize: how it is asked for transcripts."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

# Its chat template asks for speakers and times where a message has no text.
INPUTS = FamilyInputs(placeholders={"audio": "<|audio_start|><|audio_pad|><|audio_end|>"}, speech=SpeechForm())
