"""Audio Flamingo 3: how it is asked for transcripts."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

INPUTS = FamilyInputs(speech=SpeechForm("Transcribe the input speech."))
