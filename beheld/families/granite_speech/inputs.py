"""Granite Speech: how it is asked for transcripts, as its cards ask."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

INPUTS = FamilyInputs(
    speech=SpeechForm("can you transcribe the speech into a written format?", "translate the speech to English")
)
